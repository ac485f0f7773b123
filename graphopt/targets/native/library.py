"""Write the C source of a library of kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

MOST_AXES = 4  # of the operands of a matrix product
FEW_FILTERS = 5  # of a group of a convolution: fewer fill too little of a vector

_CALLS = "calls.h"
_LIMITS = f"#define MOST_AXES {MOST_AXES}\n#define FEW_FILTERS {FEW_FILTERS}\n"


def braced(items: Sequence[Any]) -> str:
    """Return C's initializer of numbers, names, and lists of them."""
    return f"{{{', '.join(str(x) if isinstance(x, int | str) else braced(x) for x in items)}}}"


@dataclass(frozen=True)
class Kernel:
    """A C function with the values that it reads and writes, in order."""

    name: str
    code: str
    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]
    header: str = "functions.h"  # that its code needs
    aligned: Sequence[tuple[int, int]] = ()  # inputs and outputs that may share memory: reads come first
    nodes: int = 0  # of the cluster that it computes

    @staticmethod
    def named(
        prefix: str,
        code: str,
        inputs: Sequence[ir.Value],
        outputs: Sequence[ir.Value],
        **facts: Any,
    ) -> Kernel:
        """Return a kernel whose name, `@` in its code, is a prefix and a hash of its code."""
        types = [x.dtype.value for x in (*inputs, *outputs) if x.dtype is not None]
        code = f"static const unsigned char types_@[] = {braced(types)};\n\n{code}"
        name = prefix + hashlib.sha256(code.encode()).hexdigest()[:16]
        return Kernel(name, code.replace("@", name), tuple(inputs), tuple(outputs), **facts)

    @staticmethod
    def calling(
        function: str,
        form: Sequence[Any],
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[ir.Value],
        header: str = "calls.h",
        before: str = "",
    ) -> Kernel:
        """Return a kernel that calls a function of a header with a constant structure.

        Args:
            form: the members of the structure.
            before: declarations that the structure refers to.
        """
        code = f"""{before}static OrtStatus *compute_@(Context *context) {{
    static const {function.capitalize()}Form form = {braced(form)};
    return {function}(context, &form);
}}
"""
        return Kernel.named(function[0], code, [x for x in inputs if x is not None], outputs, header=header)


Replacement = tuple[Kernel, Sequence[ir.Node]]  # a kernel, and the nodes that it replaces


def source(kernels: Sequence[Kernel], threads: int, pieces: int = 0) -> str:
    """Return the C source of a library that registers kernels with a session.

    Args:
        threads: the number of threads among which matrix products are split.
        pieces: how many bfloat16 numbers stand for a number of their operands; 0 keeps float32.
    """
    unique = {kernel.name: kernel for kernel in kernels}
    ordered = [unique[name] for name in sorted(unique)]
    headers = dict.fromkeys(["ort.h", *(x.header for x in ordered)])
    includes = "\n".join(f'#include "{name}"' for name in headers)
    code = "".join(f"{x.code}\n" for x in ordered)
    entries = "".join(
        f"    KERNEL({x.name}, types_{x.name}, {len(x.inputs)}, {len(x.outputs)}),\n" for x in ordered
    )
    begin = (
        f"    begin_products(base->GetApi(API_VERSION), {threads}, {pieces});\n" if _CALLS in headers else ""
    )
    begin += f"    scan_threads = {threads};\n" if "scan.h" in headers else ""
    return f"""{_LIMITS}{includes}

{code}static Kernel kernels[] = {{
{entries}}};

EXPORT OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {{
{begin}    return register_kernels(options, base, kernels, sizeof(kernels) / sizeof(*kernels));
}}
"""


def parts(kernels: Sequence[Kernel]) -> list[str]:
    """Return the C sources that are linked with a library, which are the same for all models."""
    return (
        [f'{_LIMITS}#include "convolution.h"\n'] if any(kernel.header == _CALLS for kernel in kernels) else []
    )
