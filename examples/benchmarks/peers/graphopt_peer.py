"""Run graphopt's training graph on the ONNX Runtime of this environment.

The variant `native` lowers steps to the machine, `high` and `medium` are precisions of its products, `in-place` also
writes the new state over the old one, `run` runs several steps in one call of the runtime, `fused` uses
onnxruntime-training's optimizer kernels, and `graph` a CUDA graph, for which loops are written out.
"""

from __future__ import annotations

import itertools

import onnxruntime  # noqa: F401  before the clock of compiling starts
from protocol import LOSS_SCALE, Job, Step, serve

import graphopt
import passes


def build(job: Job) -> Step:
    fused = "fused" in job.words
    precisions = {
        "float16": {
            "precision": passes.MixedPrecision(),
            "gradient": passes.Gradient(loss_scale=LOSS_SCALE),
            "loss_scale": passes.DynamicLossScale(),
        },
        "bfloat16": {"precision": passes.MixedPrecision("bfloat16")},
    }
    optimizers = {
        "sgd": passes.SGD(job.rate, fused=fused),
        "momentum": passes.SGD(job.rate, momentum=0.9, fused=fused),
        "adamw": passes.AdamW(job.rate, weight_decay=0.01, fused=fused),
    }
    training = graphopt.compile(
        job.model,
        training=passes.TrainingMode(),
        loss=passes.CrossEntropy() if job.classifies else passes.MeanSquaredError(),
        optimizer=optimizers[job.optimizer],
        **precisions.get(job.precision, {}),
    )
    if "graph" in job.words:
        training = passes.UnrollLoops()(training).model
    executor = graphopt.Executor(
        training,
        device=job.device,
        threads=job.threads or None,
        report=["loss"],
        graph_capture="graph" in job.words,
        native="native" in job.words,
        in_place="in-place" in job.words,
        matmul_precision=next((name for name in ("high", "medium") if name in job.words), "highest"),
        provider_options={"use_tf32": int(job.precision == "tf32")} if job.device == "cuda" else None,
    )
    batches = [{"x": x, "target": target} for x, target in job.data]
    if job.device == "cuda":
        batches = [executor.on_device(batch) for batch in batches]
    if "run" in job.words:
        reports = executor.iterate(itertools.cycle(batches))
        return lambda i: next(reports)["loss"]
    return lambda i: executor.step(batches[i])["loss"]


if __name__ == "__main__":
    serve(build)
