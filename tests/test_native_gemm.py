"""Matrix products in C: graphopt/targets/native/c/gemm.h against NumPy in float64."""

import ctypes
import subprocess

import ml_dtypes
import numpy as np
import pytest
from precisions import exact_product

from graphopt.targets.native import toolchain
from graphopt.targets.native.precision import PIECES, obstacle

FLAGS = [
    *("-std=gnu99", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    *("-Wall", "-Wextra", "-Werror"),
]
SIZE = 1 << 26
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

DRIVER = """
#include "gemm.h"
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#if defined(__FMA__) || defined(__aarch64__)
const int fused = 1;
#else
const int fused = 0;
#endif

/* The end of memory behind which an access ends the process. */
char *guarded(size_t size) {
    char *start = mmap(NULL, size + 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(start + size, 65536, PROT_NONE);
    return start + size;
}

typedef struct { gemm_task task; void *user; size_t index; } job;
static void *work(void *user) { job *j = user; j->task(j->user, j->index); return NULL; }
static void parallel_for(void *pool, gemm_task task, size_t count, void *user) {
    pthread_t threads[16];
    job jobs[16];
    for (size_t i = 0; i < count; i++) {
        jobs[i] = (job){task, user, i};
        if (pthread_create(threads + i, NULL, work, jobs + i)) abort();
    }
    for (size_t i = 0; i < count; i++) pthread_join(threads[i], NULL);
    *(size_t *)pool = count;
}

/* How often the epilogue saw each element, and what it saw. */
typedef struct { const gemm_product *g; int32_t *times; float *seen; } watch;
static void look(void *user, const int64_t batch[2], int64_t row0, int64_t row1, int64_t column0, int64_t column1) {
    watch *w = user;
    const gemm_product *g = w->g;
    const gemm_strides s = g->c_strides;
    for (int64_t i = row0; i < row1; i++)
        for (int64_t j = column0; j < column1; j++) {
            const int64_t at = ((batch[0] * g->batch[1] + batch[1]) * g->m + i) * g->n + j;
            w->times[at]++;
            w->seen[at] = g->c[batch[0] * s.batch[0] + batch[1] * s.batch[1] + i * s.row + j];
        }
}

size_t multiply(int64_t threads, const int64_t dims[5], const int64_t strides[12], const float *a, const float *b,
                float *c, int accumulate, int pieces, const int is_narrow[3], int32_t *times, float *seen,
                char *scratch_end) {
    gemm_product g = {.m = dims[2], .n = dims[3], .k = dims[4], .batch = {dims[0], dims[1]}, .a = a, .b = b, .c = c};
    watch w = {&g, times, seen};
    size_t tasks = 1;
    g.a_strides = (gemm_strides){strides[2], strides[3], {strides[0], strides[1]}};
    g.b_strides = (gemm_strides){strides[6], strides[7], {strides[4], strides[5]}};
    g.c_strides = (gemm_strides){strides[10], strides[11], {strides[8], strides[9]}};
    g.accumulate = accumulate, g.pieces = pieces, g.threads = threads;
    memcpy(g.is_narrow, is_narrow, sizeof g.is_narrow);
    g.parallel_for = parallel_for, g.pool = &tasks;
    if (times) g.epilogue = look, g.user = &w;
    g.scratch = scratch_end - gemm_scratch(&g);
    gemm(&g);
    return tasks;
}
"""


class Library:
    """The driver, compiled with `flags`, and memory for its operands."""

    def __init__(self, folder, flags):
        compiler = toolchain.compiler()
        if compiler is None:
            pytest.skip("needs a C compiler")
        source, library = folder / "driver.c", folder / "driver.so"
        source.write_text(DRIVER)
        macros = subprocess.run(
            [*compiler, "-march=native", "-dM", "-E", source, f"-I{toolchain.FOLDER}"], capture_output=True
        )
        if "-mavx2" in flags and b"__AVX2__" not in macros.stdout:
            pytest.skip("this processor has no AVX2")
        made = ["-shared", "-fPIC", "-pthread", f"-I{toolchain.FOLDER}", source, "-o", library]
        subprocess.run([*compiler, *FLAGS, *flags, *made], check=True)
        self.c = ctypes.CDLL(str(library))
        self.c.guarded.restype = ctypes.c_void_p
        self.c.multiply.restype = ctypes.c_size_t
        self.ends = [self.c.guarded(ctypes.c_size_t(SIZE)) for _ in range(4)]

    def array(self, number, shape, strides, dtype=np.float32):
        """Return an array that ends where the guarded memory ends."""
        size = np.dtype(dtype).itemsize
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
        assert extent * size <= SIZE
        memory = (ctypes.c_char * (extent * size)).from_address(self.ends[number] - extent * size)
        flat = np.frombuffer(memory, np.uint8).view(dtype)
        return flat, np.lib.stride_tricks.as_strided(flat, shape, [s * size for s in strides])

    def multiply(self, a, b, c, threads=1, accumulate=False, watch=None, pieces=0):
        """Write a @ b to c, or add it; return the number of tasks."""
        dims = (ctypes.c_int64 * 5)(*c.shape, a.shape[-1])
        strides = (ctypes.c_int64 * 12)(*(s // x.itemsize for x in (a, b, c) for s in x.strides))
        pointers = [ctypes.c_void_p(x.ctypes.data) for x in (a, b, c)]
        seen = [ctypes.c_void_p(x.ctypes.data) for x in watch] if watch else [None, None]
        end = ctypes.c_void_p(self.ends[3])
        threads, narrow = ctypes.c_int64(threads), (ctypes.c_int * 3)(*(x.itemsize == 2 for x in (a, b, c)))
        return self.c.multiply(threads, dims, strides, *pointers, accumulate, pieces, narrow, *seen, end)


@pytest.fixture(scope="module", params=["-march=native", "-mavx2 -mfma", ""], ids=["native", "avx2", "baseline"])
def library(request, tmp_path_factory):
    return Library(tmp_path_factory.mktemp("gemm"), request.param.split())


@pytest.fixture(
    scope="module",
    params=[
        (pieces, flags) for flags in ("-march=native", "-march=native -mno-amx-bf16 -mno-amx-tile") for pieces in (1, 2)
    ],
    ids=["medium-tiles", "high-tiles", "medium-vectors", "high-vectors"],
)
def low(request, tmp_path_factory):
    """A library whose operands are one or two bfloat16 numbers, and how many."""
    pieces, flags = request.param
    wanted = {"__AVX512BF16__"} if "-mno" in flags else {"__AMX_BF16__"}
    if not wanted <= toolchain.macros() or ("-mno" not in flags and obstacle("high")):
        pytest.skip("this processor has no such instructions")
    return Library(tmp_path_factory.mktemp("gemm"), flags.split()), pieces


def strides(rng, shape, innermost=None, broadcast=False):
    """Draw an order of the axes in memory and gaps between them."""
    order = [int(axis) for axis in rng.permutation(len(shape)) if axis != innermost]
    result, step = [0] * len(shape), 1 if innermost is not None else int(rng.choice([1, 1, 1, 2]))
    for axis in [innermost, *order] if innermost is not None else order:
        result[axis] = step
        step *= shape[axis] + (shape[axis] > 1) * int(rng.choice([0, 0, 0, 1, 5]))
        if broadcast and axis < 2 and rng.random() < 0.3:
            result[axis] = 0
    return result


def sizes(rng):
    """Draw batch sizes, m, n and k: mostly small, at times larger than a block."""
    draw = [0, 1, 2, 3, 5, 8, 13, 14, 15, 16, 17, 28, 31, 32, 33, 47, 64, 65, 100]
    m, n, k = (int(x) for x in rng.choice(draw, 3, p=[0.02, *[0.98 / 18] * 18]))
    if rng.random() < 0.15:
        large = [(401, n, k), (m, 300, k), (m, n, 523), (150, 130, 260), (260, 1200, 3), (3, 8, 30000)]
        return 1, 1, *[*large, (61, 3000, 710)][rng.integers(7)]
    return int(rng.choice([1, 1, 1, 2, 3])), int(rng.choice([1, 1, 2, 4])), m, n, k


@pytest.mark.slow
def test_against_numpy(library):
    compare_with_numpy(library)


@pytest.mark.slow
def test_bfloat16_against_numpy(low):
    """But for the rounding of sums, the products are those of the numbers that stand for the operands."""
    compare_with_numpy(*low)


@pytest.mark.slow
def test_arrays_of_bfloat16_against_numpy(low):
    """Errors are roundings of operands of float32 and of the result; the operands of bfloat16 are what they are."""
    library, pieces = low
    if pieces != 1:
        pytest.skip("a number of such an array has one piece")
    rng = np.random.default_rng(15)
    for _ in range(100):
        b0, b1, m, n, k = sizes(rng)
        shapes = (b0, b1, m, k), (b0, b1, k, n), (b0, b1, m, n)
        types = [BFLOAT16 if rng.random() < 0.7 else np.float32 for _ in range(2)]
        drawn = [strides(rng, shapes[i], broadcast=True) for i in range(2)]
        drawn.append(strides(rng, shapes[2], 3))
        (_, a), (_, b), (memory, c) = (
            library.array(i, *x) for i, x in enumerate(zip(shapes, drawn, [*types, BFLOAT16], strict=True))
        )
        for x in (a, b):
            x[...] = rng.standard_normal(x.shape)
        memory[...] = -7
        case = f"{shapes}, {drawn}, {types}"
        rounded = [x.astype(BFLOAT16).astype(np.float64) for x in (a, b)]
        exact, bound = (f(rounded[0]) @ f(rounded[1]) for f in (np.asarray, np.abs))
        library.multiply(a, b, c, pieces=1)
        error = np.abs(c.astype(np.float64) - exact)
        most = (k + 2) * np.finfo(np.float32).eps * bound + 2.0**-8 * np.abs(exact) * 1.01
        assert (error <= most).all(), case
        alone = memory.copy()
        memory[...] = -7
        library.multiply(a, b, c, threads=int(rng.integers(2, 6)), pieces=1)
        np.testing.assert_array_equal(memory.view(np.uint16), alone.view(np.uint16), case)
        kept = np.ones(len(memory), bool)  # the gaps between rows
        index = np.lib.stride_tricks.as_strided(np.arange(len(memory)), shapes[2], [8 * s for s in drawn[2]])
        kept[index.ravel()] = False
        assert (memory[kept] == -7).all(), case


def compare_with_numpy(library, pieces=0):
    rng = np.random.default_rng(14)
    tasks = set()
    (precision,) = (name for name, count in PIECES.items() if count == pieces)
    for _ in range(100):
        b0, b1, m, n, k = sizes(rng)
        shapes = (b0, b1, m, k), (b0, b1, k, n), (b0, b1, m, n)
        drawn = [
            strides(rng, shapes[0], broadcast=True),
            strides(rng, shapes[1], broadcast=True),
            strides(rng, shapes[2], 3),
        ]
        (_, a), (_, b), (memory, c) = (library.array(i, *x) for i, x in enumerate(zip(shapes, drawn, strict=True)))
        for x in (a, b):
            x[...] = rng.standard_normal(x.shape)
        accumulate = bool(rng.integers(2))
        before = rng.standard_normal(memory.shape).astype(np.float32)
        case = f"{shapes}, {drawn}, accumulate={accumulate}"
        exact, bound = exact_product(a, b, precision), exact_product(np.abs(a), np.abs(b), "highest")

        memory[...] = before
        start = c.astype(np.float64)
        library.multiply(a, b, c, accumulate=accumulate, pieces=pieces)
        alone = memory.copy()
        error = np.abs(c - exact - accumulate * start)
        most = (k + 2) * np.finfo(np.float32).eps * (bound + accumulate * np.abs(start))
        assert (error <= most).all(), case
        c[...] = 0
        touched = memory.copy()
        memory[...] = before
        c[...] = 0
        assert np.array_equal(memory, touched), f"wrote outside of C: {case}"

        for threads in 2, 5:
            memory[...] = before
            times, seen = np.zeros(c.shape, np.int32), np.full(c.shape, np.nan, np.float32)
            tasks.add(library.multiply(a, b, c, threads, accumulate, watch=(times, seen), pieces=pieces))
            assert np.array_equal(memory, alone), f"{threads} threads: {case}"
            assert (times == 1).all(), case
            assert np.array_equal(seen, c), case
    assert {1, 2, 5} <= tasks


@pytest.mark.slow
def test_nan_and_infinity(library):
    compare_special(library)


@pytest.mark.slow
def test_bfloat16_of_nan_and_infinity(low):
    """What is not finite stays so. Of two numbers for each, an infinity times any number is no number."""
    compare_special(*low)


def compare_special(library, pieces=0):
    rng = np.random.default_rng(15)
    for _ in range(30):
        _, _, m, n, k = sizes(rng)
        a, b = rng.standard_normal((1, 1, m, k)), rng.standard_normal((1, 1, k, n))
        for x in (a, b):
            special = rng.random(x.shape) < 0.02
            x[special] = rng.choice([np.nan, np.inf, -np.inf, 0], special.sum())
        a, b = a.astype(np.float32), b.astype(np.float32)
        c = np.zeros((1, 1, m, n), np.float32)
        library.multiply(a, b, c, pieces=pieces)
        with np.errstate(invalid="ignore"):
            expected = a.astype(np.float64) @ b.astype(np.float64)
        finite = np.isfinite(expected)
        assert np.array_equal(np.isfinite(c), finite), (m, n, k)
        if pieces < 2:
            assert np.array_equal(c[~finite], expected[~finite], equal_nan=True), (m, n, k)


@pytest.mark.slow
def test_a_product_and_its_addition_are_rounded_once(library):
    if not ctypes.c_int.in_dll(library.c, "fused").value:
        pytest.skip("these instructions have no fused multiplication and addition")
    epsilon = np.finfo(np.float32).eps
    for m, n in (1, 1), (9, 40):
        a = np.tile(np.array([1, 1 + epsilon], np.float32), (1, 1, m, 1))
        b = np.tile(np.array([[-1], [1 - epsilon]], np.float32), (1, 1, 1, n))
        c = np.zeros((1, 1, m, n), np.float32)
        library.multiply(a, b, c)
        assert (c == -(epsilon**2)).all()
