"""Write the C source of a library of kernels."""

from __future__ import annotations

from collections.abc import Sequence

from graphopt.native.kernels import Kernel


def source(kernels: Sequence[Kernel], threads: int) -> str:
    """Return the C source of a library that registers kernels with a session.

    Args:
        threads: the number of threads among which matrix products are split.
    """
    unique = {kernel.name: kernel for kernel in kernels}
    ordered = [unique[name] for name in sorted(unique)]
    entries = [f"    KERNEL({x.name}, types_{x.name}, {len(x.inputs)}, {len(x.outputs)})," for x in ordered]
    return "\n".join(
        [
            f"#define THREADS {threads}",
            *(f'#include "{name}"' for name in dict.fromkeys(["ort.h", *(x.header for x in ordered)])),
            "",
            *(x.code for x in ordered),
            "static Kernel kernels[] = {",
            *entries,
            "};",
            "",
            "EXPORT OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {",
            "    return register_kernels(options, base, kernels, sizeof(kernels) / sizeof(*kernels));",
            "}",
            "",
        ]
    )
