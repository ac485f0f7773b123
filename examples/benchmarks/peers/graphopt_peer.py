"""graphopt: the training graph on the ONNX Runtime of its environment.

Variants: `run`, several steps in a call of the runtime; `fused`, onnxruntime-training's optimizer kernels.
"""

from __future__ import annotations

import itertools

import onnxruntime  # noqa: F401  before the clock of compiling starts
from protocol import Job, Step, serve

import graphopt
import passes


def build(job: Job) -> Step:
    fused = job.variant == "fused"
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
    )
    executor = graphopt.Executor(training, threads=job.threads, report=["loss"])
    batches = [{"x": x, "target": target} for x, target in job.data]
    if job.variant == "run":
        reports = executor.run(itertools.cycle(batches))
        return lambda i: next(reports)["loss"]
    return lambda i: executor.step(batches[i])["loss"]


if __name__ == "__main__":
    serve(build)
