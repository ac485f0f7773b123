"""Run onnxruntime-training 1.19.2's on-device API: artifacts, then a Module and an Optimizer.

Its environment contains onnx 1.17, so that artifacts have IR version 10, the newest that it loads. It supports SGD
without momentum, and AdamW that adds epsilon before bias correction; this program makes epsilon smaller to compensate.
It also makes three changes to models that their gradients require.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper
from onnxruntime.training import artifacts, onnxblock
from onnxruntime.training.api import CheckpointState, Module, Optimizer
from protocol import Job, Step, serve

RUNNING = ("running_mean", "running_var")


def in_training(model: onnx.ModelProto, rows: int) -> onnx.ModelProto:
    """Put BatchNormalization into training mode, and add LayerNormalization's statistics and LSTM's initial states."""
    graph = model.graph
    for node in graph.node:
        if node.op_type == "BatchNormalization":
            node.attribute.append(helper.make_attribute("training_mode", 1))
            node.output.extend(f"{name}.new" for name in node.input[3:])
        if node.op_type == "LayerNormalization":
            node.output.extend(f"{node.output[0]}.{part}" for part in ("mean", "inverse"))
        if node.op_type == "LSTM":
            zeros = np.zeros((1, rows, node.attribute[0].i), np.float32)
            graph.initializer.append(numpy_helper.from_array(zeros, f"{node.output[0]}.zeros"))
            node.input.extend(["", graph.initializer[-1].name, graph.initializer[-1].name])
    return model


def build(job: Job) -> Step:
    kinds = {
        "sgd": onnxblock.optim.SGD,
        "adamw": lambda: onnxblock.optim.AdamW(eps=1e-9, weight_decay=0.01),
    }
    if job.optimizer not in kinds:
        raise SystemExit(f"its API has no optimizer {job.optimizer}")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = job.threads
    with tempfile.TemporaryDirectory() as folder:
        training, update = (str(Path(folder) / f"{name}_model.onnx") for name in ("training", "optimizer"))
        parts = {
            "requires_grad": [name for name in job.weights if not name.endswith(RUNNING)],
            "loss": artifacts.LossType.CrossEntropyLoss if job.classifies else artifacts.LossType.MSELoss,
            "artifact_directory": folder,
        }
        model = in_training(onnx.load(job.model), len(job.data[0][0]))
        artifacts.generate_artifacts(model, optimizer=kinds[job.optimizer](), **parts)
        state = CheckpointState.load_checkpoint(str(Path(folder) / "checkpoint"))
        module = Module(training, state, session_options=options)
        optimizer = Optimizer(update, module)
    optimizer.set_learning_rate(job.rate)
    batches = job.data

    def step(i: int) -> float:
        loss = module(*batches[i])
        optimizer.step()
        module.lazy_reset_grad()
        return float(loss)

    return step


if __name__ == "__main__":
    serve(build)
