"""Products of bfloat16 numbers in the form for ARM: they compile, and an emulator computes what their definition says.

Needs a cross compiler (aarch64-linux-gnu-gcc, or the wheel ziglang) and, to run them, QEMU's user mode.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess

import pytest

from graphopt.targets.native import toolchain
from graphopt.targets.native.precision import obstacle, pieces_for

FLAGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]

PROGRAM = """
#include "gemm.h"
#include <stdio.h>
#include <stdlib.h>

#ifndef TILES_OF_PROCESSOR
#error expected instructions for bfloat16 numbers
#endif

static float upper(float x, uint32_t added) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (bits + (added ? added : 0x7fff + (bits >> 16 & 1))) & 0xffff0000;
    memcpy(&x, &bits, 4);
    return x;
}

/* Return a term of a product by the definition of a precision. */
static double term(float a, float b, int pieces) {
    if (pieces == 1) return (double)upper(a, 0) * upper(b, 0);
    const float p = upper(a, 0x8000), q = upper(b, 0x8000);
    return (double)p * q + (double)p * upper(b - q, 0x8000) + (double)upper(a - p, 0x8000) * q;
}

static void in_turn(void *pool, gemm_task task, size_t count, void *user) {
    for (size_t i = 0; i < count; i++) task(user, i);
    (void)pool;
}

static float drawn(void) { return (float)(rand() % 65536) / 32768 - 1 + (float)(rand() % 4096) / (1 << 27); }

/* Round numbers, and return them as bfloat16 numbers. */
static void *narrowed(float *x, int64_t many) {
    bfloat16 *y = malloc(many * sizeof *y);
    for (int64_t i = 0; i < many; i++) x[i] = rounded_to_bfloat16(x[i]), y[i] = to_bfloat16(x[i]);
    return y;
}

/* Return the largest error, in roundings of float32 of the sum of the terms' sizes; with `narrow`, operands and results
 * are bfloat16 numbers, and the rounding of a result is no error. */
static double worst(int64_t m, int64_t n, int64_t k, int turned, int packed, int threads, int pieces, int narrow) {
    float *a = malloc(m * k * 4), *b = malloc(k * n * 4), *c = malloc(m * n * 4);
    for (int64_t i = 0; i < m * k; i++) a[i] = drawn();
    for (int64_t i = 0; i < k * n; i++) b[i] = drawn();
    for (int64_t i = 0; i < m * n; i++) c[i] = !narrow;
    void *stored[3] = {a, b, c};
    if (narrow) stored[0] = narrowed(a, m * k), stored[1] = narrowed(b, k * n), stored[2] = narrowed(c, m * n);
    gemm_product g = {.m = m, .n = n, .k = k, .batch = {1, 1}, .a = stored[0], .b = stored[1], .c = stored[2]};
    g.pieces = pieces, g.threads = threads, g.parallel_for = in_turn, g.accumulate = !narrow;
    for (int i = 0; i < 3; i++) g.is_narrow[i] = narrow;
    g.a_strides = turned & 1 ? (gemm_strides){1, m, {0, 0}} : (gemm_strides){k, 1, {0, 0}};
    g.b_strides = turned & 2 ? (gemm_strides){1, k, {0, 0}} : (gemm_strides){n, 1, {0, 0}};
    g.c_strides = (gemm_strides){n, 1, {0, 0}};
    void *panels = NULL;
    if (packed) gemm_panels(&g, panels = aligned_alloc(64, gemm_panel_bytes(&g) + 64)), g.panels = panels;
    g.scratch = malloc(gemm_scratch(&g));
    gemm(&g);
    double most = 0;
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = !narrow, size = 1;
            for (int64_t p = 0; p < k; p++) {
                const float x = a[turned & 1 ? p * m + i : i * k + p], y = b[turned & 2 ? j * k + p : p * n + j];
                sum += term(x, y, pieces), size += x * y < 0 ? -x * y : x * y;
            }
            const float result = narrow ? from_bfloat16(((bfloat16 *)stored[2])[i * n + j]) : c[i * n + j];
            double error = result < sum ? sum - result : result - sum;
            if (narrow) error -= (sum < 0 ? -sum : sum) / 256;
            error *= (1 << 23) / size / (k + 2);
            if (!(error <= most)) most = error;
        }
    for (int i = 0; narrow && i < 3; i++) free(stored[i]);
    free(a), free(b), free(c), free(g.scratch), free(panels);
    return most;
}

int main(void) {
    const int64_t sizes[][3] = {{1, 1, 1}, {16, 16, 32}, {33, 47, 65}, {70, 40, 600}, {300, 75, 33}, {8, 130, 96}};
    double most = 0;
    for (unsigned s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int way = 0; way < 48; way++) {
            const int turned = way & 3, packed = way >> 2 & 1, threads = way >> 3 & 1 ? 3 : 1, form = way >> 4;
            const int64_t *d = sizes[s];
            const double error = worst(d[0], d[1], d[2], turned, packed, threads, form == 1 ? 2 : 1, form == 2);
            if (!(error <= most)) most = error;
        }
    printf("%g\\n", most);
    return !(most < 1);
}
"""


def cross_compiler():
    """Return the command of a compiler for ARM on Linux; skip the test without one."""
    found = shutil.which("aarch64-linux-gnu-gcc")
    if found:
        return [found, "-march=armv8.2-a+bf16"]
    spec = importlib.util.find_spec("ziglang")
    for folder in (spec and spec.submodule_search_locations) or ():
        zig = shutil.which("zig", path=folder)
        if zig:
            return [zig, "cc", "-target", "aarch64-linux-musl", "-mcpu=generic+bf16"]
    return pytest.skip("no compiler for ARM: install gcc-aarch64-linux-gnu, or pip install ziglang")


def compiled(source, target, *flags):
    command = [*cross_compiler(), *FLAGS, *flags, f"-I{toolchain.FOLDER}", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_products_and_convolutions_compile_for_arm(tmp_path):
    source = tmp_path / "parts.c"
    source.write_text('#define MOST_AXES 4\n#define FEW_FILTERS 5\n#include "convolution.h"\n#include "scan.h"\n')
    compiled(source, tmp_path / "parts.o", "-c", "-w")
    assert (tmp_path / "parts.o").stat().st_size > 10_000


@pytest.mark.slow
def test_products_of_bfloat16_numbers_on_an_emulator(tmp_path):
    source, program = tmp_path / "program.c", tmp_path / "program"
    source.write_text("#define MOST_AXES 4\n" + PROGRAM)
    compiled(source, program, "-static", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function")
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None:
        pytest.skip("no emulator of ARM: install qemu-user-static")
    done = subprocess.run([emulator, "-cpu", "max", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"the worst error is {done.stdout}{done.stderr}"


@pytest.mark.parametrize(("flag", "pieces"), [("fp asimd bf16", 1), ("fp asimd", 0)])
def test_arm_multiplies_bfloat16_numbers_if_the_system_says_so(flag, pieces, monkeypatch):
    from graphopt.targets.native import precision

    monkeypatch.setattr(precision, "macros", lambda: frozenset({"__ARM_FEATURE_BF16_VECTOR_ARITHMETIC"}))
    monkeypatch.setattr(precision, "_cpuinfo", lambda: f"Features\t: {flag}")
    assert pieces_for("medium") == pieces
    assert "expected a processor with AMX" in obstacle("high")
