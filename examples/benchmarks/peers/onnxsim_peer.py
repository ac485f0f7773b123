"""Run onnxsim 0.8's training loop: one graph per step, on the onnxruntime of this environment.

It requires static shapes and a model that contains the loss. Its Adam has no weight decay. It has no option for
threads, so this program patches the options of its session.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnxsim.compile_training import CustomOptimizer, compile_training_loop
from protocol import Job, Step, serve

RUNNING = ("running_mean", "running_var")
CROSS_ENTROPY = """cost (float[N,C] y, float[N,C] target, float share) => (float loss) {
    p = Softmax <axis = 1> (y)
    log = Log (p)
    each = Mul (log, target)
    sum = ReduceSum <keepdims = 0> (each)
    loss = Mul (sum, share)
}"""
SQUARES = """cost (float[N,C] y, float[N,C] target, float share) => (float loss) {
    d = Sub (y, target)
    each = Mul (d, d)
    sum = ReduceSum <keepdims = 0> (each)
    loss = Mul (sum, share)
}"""


def with_loss(job: Job) -> onnx.ModelProto:
    """Return the model with a fixed batch and a loss of one-hot targets; onnxsim does not support integer ones."""
    model = onnx.load(job.model)
    graph = model.graph
    batch, classes = len(job.data[0][0]), graph.output[0].type.tensor_type.shape.dim[1].dim_value
    graph.input[0].type.tensor_type.shape.dim[0].dim_value = batch
    graph.input.append(helper.make_tensor_value_info("target", TensorProto.FLOAT, [batch, classes]))
    graph.initializer.append(
        helper.make_tensor("share", TensorProto.FLOAT, [], [-1 / batch if job.classifies else 1 / (batch * classes)])
    )
    graph.node.extend(onnx.parser.parse_graph(CROSS_ENTROPY if job.classifies else SQUARES).node)
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    return model


def plain_sgd() -> CustomOptimizer:
    text = """<ir_version: 8, opset_import: ["": 17]>
        sgd (float[2] w, float[2] g, float rate) => (float[2] next) { d = Mul (rate, g) next = Sub (w, d) }"""
    return CustomOptimizer(onnx.parser.parse_model(text), num_state=0)


def build(job: Job) -> Step:
    plain = onnxruntime.SessionOptions

    def options() -> onnxruntime.SessionOptions:
        found = plain()
        found.intra_op_num_threads = job.threads
        return found

    onnxruntime.SessionOptions = options
    kinds = {"sgd": plain_sgd, "momentum": lambda: "sgd_momentum", "adamw": lambda: "adam"}
    loop = compile_training_loop(
        with_loss(job),
        "loss",
        [name for name in job.weights if not name.endswith(RUNNING)],
        optimizer=kinds[job.optimizer](),
    )
    classes = np.eye(loop.model.graph.input[1].type.tensor_type.shape.dim[1].dim_value, dtype=np.float32)
    batches = [{"x": x, "target": classes[target] if job.classifies else target} for x, target in job.data]
    return lambda i: loop(batches[i], job.rate)


if __name__ == "__main__":
    serve(build)
