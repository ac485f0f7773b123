"""Write the C source of a library of kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx_ir as ir

MOST_AXES = 4  # of the operands of a matrix product
FEW_FILTERS = 5  # of a group of a convolution: fewer fill too little of a vector

_CALLS, _CLUSTERS = "calls.h", "functions.h"  # the headers of products and convolutions, and of clusters
# Headers that define these functions, each also products
_ATTENTION, _CONVOLUTION = ("attention", "convolution")
_NARROW = ir.DataType.BFLOAT16
_FEW = 4  # kernels, which take a compiler as long as it takes to start
_LIMITS = f"#define MOST_AXES {MOST_AXES}\n#define FEW_FILTERS {FEW_FILTERS}\n"


Item = int | str | Sequence["Item"]  # of an initializer in C: a number, a name, or a list of them


def braced(items: Sequence[Item]) -> str:
    """Return C's initializer of numbers, names, and lists of them."""
    return f"{{{', '.join(str(x) if isinstance(x, int | str) else braced(x) for x in items)}}}"


@dataclass(frozen=True)
class Kernel:
    """A C function with the values that it reads and writes, in order."""

    name: str
    code: str
    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]
    header: str = _CLUSTERS  # that its code needs
    aligned: Sequence[tuple[int, int]] = ()  # inputs and outputs that may share memory: reads come first
    nodes: int = 0  # of the cluster that it computes

    @staticmethod
    def named(
        prefix: str,
        code: str,
        inputs: Sequence[ir.Value],
        outputs: Sequence[ir.Value],
        *,
        header: str = _CLUSTERS,
        aligned: Sequence[tuple[int, int]] = (),
        nodes: int = 0,
    ) -> Kernel:
        """Return a kernel whose name, `@` in its code, is a prefix and a hash of its code."""
        types = [x.dtype.value for x in (*inputs, *outputs) if x.dtype is not None]
        name = prefix + hashlib.sha256(f"{types}\n{code}".encode()).hexdigest()[:16]
        return Kernel(name, code.replace("@", name), tuple(inputs), tuple(outputs), header, aligned, nodes)

    @staticmethod
    def calling(
        function: str,
        form: Sequence[Item],
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[ir.Value],
        header: str = _CALLS,
        before: str = "",
    ) -> Kernel:
        """Return a kernel that calls a function of a header with a constant structure.

        Args:
            form: the members of the structure.
            before: declarations that the structure refers to.
        """
        code = f"""{before}OrtStatus *compute_@(Context *context) {{
    static const {function.capitalize()}Form form = {braced(form)};
    return {function}(context, &form);
}}
"""
        return Kernel.named(function[0], code, [x for x in inputs if x is not None], outputs, header=header)


Replacement = tuple[Kernel, Sequence[ir.Node]]  # a kernel, and the nodes that it replaces


def source(kernels: Sequence[Kernel], threads: int, pieces: int = 0, rates: Sequence[float] | None = None) -> str:
    """Return the C source of a library that registers kernels with a session, which objects define in part.

    Args:
        threads: the number of threads among which matrix products are split.
        pieces: how many bfloat16 numbers stand for a number of their operands; 0 keeps float32.
        rates: the members of `Rates` in calls.h, measured on this machine; None, or none, for those of rates.h.
    """
    ordered = _unique(kernels)
    headers = dict.fromkeys(["ort.h", *(x.header for x in ordered if x.header != _CLUSTERS)])
    includes = "\n".join(f'#include "{name}"' for name in headers)
    code = "".join(f"OrtStatus *compute_{x.name}(Context *);\n" for x in ordered)
    code += "".join(f"\n{x.code}" for x in ordered if x.header != _CLUSTERS)
    types = {x.name: [y.dtype.value for y in (*x.inputs, *x.outputs) if y.dtype is not None] for x in ordered}
    tables = "".join(f"static const unsigned char types_{name}[] = {braced(own)};\n" for name, own in types.items())
    entries = "".join(f"    KERNEL({x.name}, types_{x.name}, {len(x.inputs)}, {len(x.outputs)}),\n" for x in ordered)
    measured = "NULL" if not rates else f"&(Rates){{{', '.join(rate.hex() for rate in rates)}}}"
    products = f"    begin_products(base->GetApi(API_VERSION), {threads}, {pieces}, {measured});\n"
    begin = products if _CALLS in headers else ""
    begin += f"    scan_threads = {threads};\n" if "scan.h" in headers else ""
    return f"""{_LIMITS}{includes}

const OrtApi *api;

{code}
{tables}
static Kernel kernels[] = {{
{entries}}};

EXPORT OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {{
{begin}    return register_kernels(options, base, kernels, sizeof(kernels) / sizeof(*kernels));
}}
"""


def objects(kernels: Sequence[Kernel], most: int) -> list[str]:
    """Return the C sources of at most so many objects, which together have the kernels of clusters."""
    codes = sorted((x.code for x in _unique(kernels) if x.header == _CLUSTERS), key=len)
    includes = "".join(f'#include "{name}"\n' for name in ("ort.h", _CLUSTERS, "narrow.h", "stores.h"))
    return [f"{_LIMITS}{includes}\n{code}" for code in map("\n".join, _dealt(codes, most))]


def parts(kernels: Sequence[Kernel], pieces: int) -> list[str]:
    """Return the C sources that are linked with a library, which are the same for all models; see `source`."""
    called = [kernel for kernel in kernels if kernel.header == _CALLS]
    convolves = any(f"{_CONVOLUTION.capitalize()}Form" in kernel.code for kernel in called)
    narrow = any(x.dtype == _NARROW for kernel in called for x in (*kernel.inputs, *kernel.outputs))
    return [_part(convolves=convolves, is_low=narrow or pieces > 0)] if called else []


def parts_for(operators: Collection[str], *, is_low: bool = False) -> list[str]:
    """Return what `parts` probably returns for the kernels of a graph with these operators.

    Args:
        is_low: they may multiply bfloat16 numbers, whose products take as long to compile as those of float32.
    """
    convolves = not {"Conv", "ConvTranspose"}.isdisjoint(operators)
    multiplies = convolves or not {"Gemm", "MatMul"}.isdisjoint(operators)
    return [_part(convolves=convolves, is_low=is_low)] if multiplies else []


def _part(*, convolves: bool, is_low: bool) -> str:
    headers = [_ATTENTION, *[_CONVOLUTION, "measured"] * convolves]
    limits = _LIMITS if is_low else f"{_LIMITS}#define ONLY_FLOAT32\n"
    return limits + "".join(f'#include "{header}.h"\n' for header in headers)


def _unique(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return each kernel once, in the order of their names."""
    return [kernel for _, kernel in sorted({kernel.name: kernel for kernel in kernels}.items())]


def _dealt(codes: Sequence[str], most: int) -> list[Sequence[str]]:
    """Return codes, in the order of their lengths, in at most so many parts of about the same length."""
    count = min(most, -(-len(codes) // _FEW))
    return [codes[i::count] for i in range(count)]
