"""Declare the options of a device, and check what does not depend on its kind."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from graphopt.arguments import Checked
from graphopt.errors import GraphoptError
from graphopt.fields import check_options
from graphopt.files import ReadPath
from graphopt.runtime.system_memory import bytes_of_size
from graphopt.targets.native.precision import MatmulPrecision
from graphopt.targets.target import AUTO, NATIVE, Target

_FROZEN = ("auto", "packed", "mapped", "low")
MOST_THREADS = 1_024  # more would take the memory, or end the process
NATIVE_VARIABLE, VERIFY = "GRAPHOPT_NATIVE", "GRAPHOPT_VERIFY"  # of the environment


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceOptions(Checked):
    """Declare the options of a device. A new option needs a field here and a line in a recipe.

    Args:
        threads: the number of threads per operator; by default, the runtime's choice.
        deterministic: use kernels that return the same numbers in each run, and evaluate in one form.
        provider: an execution provider of the installed ONNX Runtime, by its full or short name, such as `openvino`;
            by default, the device's own. Operators without a kernel run on the CPU.
        provider_options: the options of the provider. On CUDA, `use_tf32: 1` rounds products to 10 bits and is faster,
            `cudnn_conv_algo_search: EXHAUSTIVE` times all algorithms for each new shape, and `gpu_mem_limit` holds for
            each session, without state and batches. On WebGPU, the first session's options, such as `powerPreference`,
            hold for all sessions of a process.
        graph_capture: on a GPU, capture the commands of a step, once per batch shape, and replay them. Steps with If,
            Loop or Scan, or with nodes on the CPU, are not supported.
        low_memory: free each buffer after its last reader, without a memory plan or buffers for reuse. Small graphs
            become slower.
        frozen: where the weights lie that do not train. `packed`: each session has copies in the layout of its kernels,
            up to three on CPUs; the fastest for small batches. `mapped`: all sessions read the same memory, which for
            large files is the file itself, and a GPU has one copy. `low`: as `mapped`, and each value of a step is
            freed after its last reader, as with `low_memory`; on CPUs, these sessions share the memory of values,
            which the process keeps. `auto`: `packed` below 512 MB, `low` from 2 GB, and for
            steps on CPUs from 64 million weights.
        memory: the plan for what the process takes at most, such as `2 GB` or `512 MiB`, beside pages of files, which
            the system may drop. On CPUs only: `frozen` is `low`, shapes are static, and a step that does not fit takes
            `passes.Recompute` with the largest budget that does. One that cannot fit is refused before it runs, with
            the least that would do.
        flush_denormals: compute with 0 in place of denormal numbers (below 1e-38 in float32), which are slow; on CPUs
            with Linux and x86-64 only. Other code in the calling thread is not affected.
        native: lower steps to the machine: compile kernels for it with the system's C compiler. `auto` does so on the
            CPU for models of 10,000 parameters or more without float16 values, keeps the faster form, and runs the
            graph as it is without a compiler. A graph of 500 nodes or more also runs as it is while another process
            compiles and compares, and then in both forms in turns, unless steps are `deterministic`. Where `frozen` is
            `low`, as for 64 million weights, it takes kernels without measuring both forms, which would take as long.
            True insists; None takes the environment variable GRAPHOPT_NATIVE, or `auto`. Evaluations and predictions
            that take longer than a second run in kernels, too, or with the weights as constants as long as the state
            stays the same, where that is faster.
        target: what steps are lowered for: `native` and `onnxruntime` are as `native=True` and `native=False`,
            `plain` runs the graph as it is, and a `graphopt.Target` has passes of its own. `auto` takes the option
            `native`.
        matmul_precision: the precision in which matrix products, convolutions, attention and recurrent layers multiply
            float32 numbers; sums are float32, and so is all else. `highest` multiplies float32 numbers. `high` takes
            each as the sum of two bfloat16 numbers and leaves out the product of the smaller ones: results differ by
            about 1e-5. `medium` rounds them to bfloat16: about 1e-2. On CPUs, both need kernels (`native`) and a
            processor with AMX, or for `medium` AVX-512 BF16 by AMD or ARM's BFMMLA; elsewhere `highest` runs, and a
            warning says so. On CUDA, both set `use_tf32`, as in PyTorch. None takes the environment variable
            GRAPHOPT_MATMUL_PRECISION, or `highest`.
        verify: what to check before the first update. `first` checks the plain step on the first batch, once per graph,
            form of the batch and machine: its predictions are those of the file run by ONNX Runtime as it is, its
            gradient is the slope of the loss by central differences (along the gradients of all parameters, which
            are halved where it differs, and along random signs), and the optimizer's update follows its formula.
            A disagreement is an error that names a reproducer. Then, the first step of each form that was rewritten
            for speed (fused, kernels, in place, several steps per call) is compared with the plain step. If they
            differ by more than rounding, the plain step runs, and a warning names a reproducer. `full` checks the
            gradient of each parameter. True does what `first` does each time, and raises an error for other forms,
            too. False checks and compares nothing. `auto` is the same as `first`; None takes the environment variable
            GRAPHOPT_VERIFY, or `first`.
        session_options: options of ONNX Runtime's sessions by name: attributes of SessionOptions, such as
            `inter_op_num_threads`, and configuration entries, such as `session.intra_op.allow_spinning`. Options that
            read or write files are not supported, because recipes may set them.
        custom_ops: libraries of custom operators that the graph calls, which its sessions load. Libraries are code:
            a recipe cannot name them.
    """

    threads: int | None = None
    deterministic: bool = False
    provider: str | None = None
    provider_options: Mapping[str, Any] | None = None
    graph_capture: bool = False
    low_memory: bool = False
    frozen: Literal["auto", "packed", "mapped", "low"] = "auto"
    memory: str | None = None
    flush_denormals: bool = True
    native: bool | Literal["auto"] | None = None
    target: str | Target = AUTO
    matmul_precision: MatmulPrecision | None = None
    verify: bool | Literal["auto", "first", "full"] | None = None
    session_options: Mapping[str, Any] | None = None
    custom_ops: Sequence[ReadPath] | None = None


def check_device_options(options: DeviceOptions) -> None:
    """Raise an error unless options have their types and lie in their intervals."""
    check_options(options, "device")
    if options.threads is not None and not 1 <= options.threads <= MOST_THREADS:
        least = "1 or more, or None for the runtime's choice"
        expected = least if options.threads < 1 else f"at most {MOST_THREADS:,}"
        raise GraphoptError(f"threads: expected {expected}, found {options.threads}")
    if options.memory is not None:
        bytes_of_size(options.memory)
    if options.frozen not in _FROZEN:
        raise GraphoptError(f"frozen: expected {', '.join(_FROZEN)}, found {options.frozen!r}")


def native_of(options: DeviceOptions) -> bool | str:
    """Return the option `native`, or what the option `target` or the environment says in its place.

    Raises:
        GraphoptError: both options are given, or the environment variable has another value.
    """
    native = options.target in (AUTO, NATIVE) and (options.target == NATIVE or options.native)
    if options.native not in (None, native):
        raise GraphoptError(
            f"target: expected one of the options native and target, found native={options.native} and "
            f"target={options.target!r}: leave one out"
        )
    return _resolved("native", NATIVE_VARIABLE, native)


def verify_of(options: DeviceOptions) -> bool | str:
    """Return the option `verify`, or the environment's; `first` for `auto`.

    Raises:
        GraphoptError: it has another value.
    """
    verify = _resolved("verify", VERIFY, options.verify, ("first", "full"))
    return "first" if verify == "auto" else verify


def _resolved(name: str, variable: str, option: object, further: Sequence[str] = ()) -> bool | str:
    """Return an option, or the environment's: a Boolean, `auto`, or a further word."""
    words: dict[str, bool | str] = {"true": True, "false": False, "auto": "auto"}
    words |= {word: word for word in further}
    text = os.environ.get(variable, "auto") if option is None else option
    chosen = words.get(str(text).lower())
    if chosen is None:
        what = f"environment variable {variable}" if option is None else name
        expected = f"{', '.join(['auto', *further, 'true'])} or false"
        raise GraphoptError(f"{what}: expected {expected}, found {text!r}")
    return chosen
