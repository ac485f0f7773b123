"""Write the C source of a library of kernels."""

from __future__ import annotations

from collections.abc import Sequence

from graphopt.targets.native.kernels import Kernel

CALLS = "calls.h"
PRODUCTS = '#include "product.h"\n#include "convolution.h"\n'


def source(kernels: Sequence[Kernel], threads: int) -> str:
    """Return the C source of a library that registers kernels with a session.

    Args:
        threads: the number of threads among which matrix products are split.
    """
    unique = {kernel.name: kernel for kernel in kernels}
    ordered = [unique[name] for name in sorted(unique)]
    headers = list(dict.fromkeys(["ort.h", *(x.header for x in ordered)]))
    entries = [f"    KERNEL({x.name}, types_{x.name}, {len(x.inputs)}, {len(x.outputs)})," for x in ordered]
    begin = [f"    begin_products(base->GetApi(API_VERSION), {threads});"] if CALLS in headers else []
    begin += [f"    scan_threads = {threads};"] if "scan.h" in headers else []
    return "\n".join(
        [
            *(f'#include "{name}"' for name in headers),
            "",
            *(x.code for x in ordered),
            "static Kernel kernels[] = {",
            *entries,
            "};",
            "",
            "EXPORT OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {",
            *begin,
            "    return register_kernels(options, base, kernels, sizeof(kernels) / sizeof(*kernels));",
            "}",
            "",
        ]
    )


def parts(kernels: Sequence[Kernel]) -> list[str]:
    """Return the C sources that are linked with a library, which are the same for all models."""
    return [PRODUCTS] if any(kernel.header == CALLS for kernel in kernels) else []
