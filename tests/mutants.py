"""Wrong rules: each a line of a rule changed, that the tests of its operators must notice.

`python tests/mutants.py [NUMBER ...]` tries them, prints what each is noticed by, and those that are not.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import multiprocessing
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VARIABLE = "GRAPHOPT_MATMUL_PRECISION"
RULES = Path("passes/gradients/rules")

# Where an operating system can, processes start as copies of one that has loaded what takes seconds.
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
PROCESSES: Any = multiprocessing.get_context(METHOD)
PROCESSES.set_forkserver_preload(["torch", "onnx.reference", "onnxscript", "onnxruntime", "pytest"])


@dataclass(frozen=True)
class Mutant:
    """A change of one place of a file.

    Args:
        file: relative to the folder.
        operators: whose cases are tried, space-separated.
        tests: the file of the tests.
        chosen: which tests are tried, in place of cases of operators: an expression of pytest's `-k`.
        folder: relative to the repository.
        precision: in which the tests multiply, or none.
    """

    file: str
    operators: str
    old: str
    new: str
    tests: str = "test_gradient.py"
    chosen: str = ""
    folder: Path = RULES
    precision: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.old} -> {self.new}"

    @property
    def path(self) -> Path:
        """Return the file, relative to the repository."""
        return self.folder / self.file

    def mutated(self) -> str:
        """Return the file's text with the change.

        Raises:
            ValueError: the old text is not there, or more than once: this list must follow the rules. Or nothing
                defines a name of the new text, which any test notices.
            SyntaxError: the new text is no Python.
        """
        text = (ROOT / self.path).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: expected {self.old!r} once, found it {text.count(self.old)} times")
        changed = text.replace(self.old, self.new)
        if self.path.suffix == ".py" and (names := undefined(changed)):
            raise ValueError(f"{self}: expected names that {self.file} defines, found {', '.join(sorted(names))}")
        return changed


def undefined(source: str) -> set[str]:
    """Return the global names that a module reads, and that neither it nor Python defines."""
    codes = [compile(source, "module", "exec")]
    read, defined = set(), {*dir(builtins), "__annotations__", "__file__"}
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for line in dis.get_instructions(code):
            if line.opname in ("STORE_NAME", "STORE_GLOBAL"):
                defined.add(line.argval)
            elif line.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
                read.add(line.argval)
    return read - defined


def of(file: str, *rows: tuple[str, str, str], tests: str = "test_gradient.py") -> list[Mutant]:
    return [Mutant(file, operators, old, new, tests) for operators, old, new in rows]


MUTANTS = [
    *of(
        "elementwise.py",
        ("Relu", "alpha=1e30, beta=-1e-30", "alpha=1e3, beta=-1e-30"),
        (
            "Relu",
            '"Relu": (lambda op, x, y: _positive(op, y),)',
            '"Relu": (lambda op, x, y: _positive(op, x + 1e-6),)',
        ),
        (
            "Sub",
            '"Sub": (lambda op, a, b, y: 1, lambda op, a, b, y: -1)',
            '"Sub": (lambda op, a, b, y: 1, lambda op, a, b, y: 1)',
        ),
        ("Div", "lambda op, a, b, y: -y / b", "lambda op, a, b, y: -y"),
        ("Mod", "lambda op, a, b, y: op.Round((y - a) / b)", "lambda op, a, b, y: op.Round((a - y) / b)"),
        ("PRelu", "op.Min(x, 0.0),", "op.Max(x, 0.0),"),
        (
            "HardSwish",
            "x / 6 * mask(op, op.Less(op.Abs(x), 3.0), x)",
            "x / 3 * mask(op, op.Less(op.Abs(x), 3.0), x)",
        ),
        ("Elu", "(y + (alpha - 1))", "y"),
        ("Celu", "op.Min(y, 0.0) * (1 / alpha)", "op.Min(y, 0.0)"),
        ("Gelu", "+ 3 * scale * cubic * square", "+ scale * cubic * square"),
        ("Mish", "x * op.Sigmoid(x) * (1 - t * t)", "x * op.Sigmoid(x) * (1 - t)"),
        ("Pow", "return n * x if n == 2", "return x if n == 2"),
        ("Clip", "low and dy * mask(op, op.And(below, op.Not(above)), x)", "low and dy * mask(op, below, x)"),
        ("Where", "dy - chosen]", "dy]"),
        ("Mean", "dy * (1 / len(inputs))", "dy * len(inputs)"),
        ("Max Min", "dy = dy - gradients[-1]", "dy = dy"),
        ("Max Min", "(op.GreaterOrEqual, op.Max)", "(op.Greater, op.Max)"),
        ("Atanh", "1 / (1 - x * x),),", "1 / (1 + x * x),),"),
    ),
    *of(
        "reduction.py",
        ("ReduceMax ReduceMin", "chosen * (dy / op.ReduceSum(chosen, **along))", "chosen * dy"),
        ("ReduceL2", "x * (dy / nonzero(op, y))", "x * (dy / y)"),
        ("ReduceL1", "op.Sign(x) * dy", "dy"),
        ("ReduceSumSquare", "x * (2 * dy)", "x * dy"),
        ("ReduceLogSumExp", "op.Exp(x - y) * dy", "op.Exp(y - x) * dy"),
        ("ReduceProd", "others = op.ReduceSum(zero, **along) - zero", "others = op.ReduceSum(zero, **along)"),
        (
            "ReduceMean",
            'known.tolist() or ([] if along["noop_with_empty_axes"] else range(rank(x)))',
            "known.tolist() or range(rank(x))",
        ),
        ("ReduceSum", 'if not how["keepdims"] and axes is not None:', "if False:"),
    ),
    *of(
        "reduction.py",
        ("LpNormalization", "(op.Sign(x) if p == 1 else y)", "y"),
        ("LpNormalization", "/ nonzero(op, norm)]", "/ norm]"),
        ("LRN", "before, after = (size - 1) // 2, size // 2", "before, after = size // 2, (size - 1) // 2"),
        ("LRN", "2 * alpha * beta * x", "alpha * beta * x"),
        ("LayerNormalization", "dx - share * inverse * inverse * z if i", "dx - share * inverse * z if i"),
        ("LayerNormalization InstanceNormalization", " - z * op.ReduceMean(dz * z, axes))", ")"),
        (
            "BatchNormalization",
            "-0.5 * scale * inverse * inverse * dscale",
            "0.5 * scale * inverse * inverse * dscale",
        ),
        ("BatchNormalization", "2 * share * z / inverse if i", "share * z / inverse if i"),
    ),
    *of(
        "windows.py",
        (
            "MaxPool",
            "np.arange(window.taps, 0, -1)",
            "np.arange(1, window.taps + 1)",
        ),
        ("MaxPool", "first = mask(op, op.Equal(score, ", "first = mask(op, op.LessOrEqual(score, "),
        ("GlobalMaxPool", "op.ArgMax(planes, axis=1)", "op.ArgMax(planes, axis=1, select_last_index=1)"),
        ("MaxPool", "[0] * (rank(x) + 2) + missing", "missing + [0] * (rank(x) + 2)"),
        (
            "AveragePool",
            "window.elements(i, count, size, bool(count_include_pad))",
            "window.elements(i, count, size, True)",
        ),
        ("AveragePool", "not ceil_mode and (count_include_pad or", "not ceil_mode or (count_include_pad and"),
        ("LpPool GlobalLpPool", "op.constant(p - 1.0, like=x)", "op.constant(p - 2.0, like=x)"),
        ("GlobalAveragePool", "dy / op.count(x, range(2, rank(x)))", "dy / op.count(x, range(1, rank(x)))"),
        ("MaxUnpool", "op.Max(where - 1, 0)", "op.Max(where, 0)"),
    ),
    *of(
        "windows.py",
        (
            "Conv",
            "strides=window.dilations,\n        dilations=window.strides,",
            "strides=window.strides,\n        dilations=window.dilations,",
        ),
        (
            "Conv",
            "op.ReduceSum(dy, [0, *range(2, rank(dy))], keepdims=0)",
            "op.ReduceMean(dy, [0, *range(2, rank(dy))], keepdims=0)",
        ),
        (
            "ConvTranspose",
            'taps_of(x, node, w))\n    more = node.attributes.get_ints("output_padding", ',
            'taps_of(x, node, w))\n    more = node.attributes.get_ints("", ',
        ),
        ("Col2Im", "np.eye(places)", "np.eye(places)[::-1]"),
    ),
    *of(
        "linear.py",
        ("Gemm", "dy if beta == 1 else dy * beta", "dy"),
        ("Gemm", "da = (b, dy, transB, 1) if transA", "da = (b, dy, 1 - transB, 1) if transA"),
        ("MatMul", "op.Squeeze(op.MatMul(row, a), [-2])", "op.Squeeze(op.MatMul(row, a * a), [-2])"),
        ("Einsum", 'right = ("..." if "..." in left else "") + "".join(once)', 'right = "".join(once)'),
        (
            "Einsum",
            "once = sorted({x for x in left if x.isalpha()",
            "once = list({x: 0 for x in left if x.isalpha()",
        ),
        ("Det", "(-1.0) ** np.add.outer", "(1.0) ** np.add.outer"),
    ),
    *of(
        "shape.py",
        (
            "ScatterElements ScatterND",
            'share = dy / op.Max(scatter(unchanged, taken, "add"), 1.0)',
            "share = dy",
        ),
        (
            "ScatterElements ScatterND",
            "[scatter(dy, zeros(op, updates)), None, gather(dy)]",
            "[dy, None, gather(dy)]",
        ),
        ("Slice", "first, size - max(first, last)", "first, size - last"),
        ("Pad", "return [dx, None, rest]", "return [dx, None, None]"),
        ("Gather", "before = index.item() % size", "before = abs(index.item())"),
        ("OneHot", "op.Unsqueeze(total - on, [0])", "op.Unsqueeze(total, [0])"),
        ("TensorScatter", 'if mode == "circular":', 'if mode == "linear":'),
    ),
    *of(
        "shape.py",
        ("Transpose", "perm=np.argsort(perm).tolist())", "perm=perm)"),
        (
            "CumSum",
            "op.CumSum(dy, axis, exclusive=exclusive, reverse=1 - reverse)",
            "op.CumSum(dy, axis, exclusive=0, reverse=1 - reverse)",
        ),
        ("Tile", "[*range(0, 2 * rank(x), 2)]", "[*range(1, 2 * rank(x), 2)]"),
        ("DepthToSpace", "perm=[0, 2, 1, 3, 4]", "perm=[0, 1, 2, 3, 4]"),
        ("Trilu", "op.Trilu(dy, k, upper=upper)", "op.Trilu(dy, None, upper=upper)"),
    ),
    *of(
        "reduction.py",
        ("Softmax", "y * (dy - op.ReduceSum(y * dy, [axis]))", "y * (dy - op.ReduceSum(y * dy, [-1]))"),
        ("LogSoftmax", "op.Exp(y) * op.ReduceSum(dy, [axis])", "y * op.ReduceSum(dy, [axis])"),
    ),
    *of(
        "elementwise.py",
        ("", "low, high = float(dtype.min), float(dtype.max)", "low, high = -1e9, 1e9"),
        (
            "",
            "rounded = rounded + stretched(op, zero, x, axis, block_size)",
            "rounded = rounded - stretched(op, zero, x, axis, block_size)",
        ),
        tests="test_quantization.py",
    ),
    *of(
        "sampling.py",
        (
            "Resize",
            'left_out = ("axes", "extrapolation_value", ',
            'left_out = ("cubic_coeff_a", "axes", "extrapolation_value", ',
        ),
        (
            "Resize",
            'left_out = ("axes", "extrapolation_value", ',
            'left_out = ("exclude_outside", "axes", "extrapolation_value", ',
        ),
    ),
    *of(
        "sampling.py",
        ("GridSample", "[1, 0, -2.25, 1.25]", "[1, 0, -2.25, 1.5]"),
        (
            "GridSample",
            "(0.0, size - 1) if align_corners else (-0.5, size - 0.5)",
            "(-0.5, size - 0.5) if align_corners else (0.0, size - 1)",
        ),
        (
            "AffineGrid",
            "shift = op.Unsqueeze(op.ReduceSum(rows, [1], keepdims=0), [2])",
            "shift = op.Unsqueeze(op.ReduceMean(rows, [1], keepdims=0), [2])",
        ),
    ),
    *of(
        "sampling.py",
        ("RoiAlign", "(sample + 0.5) / count", "sample / count"),
        ("MaxRoiPool", "op.Floor(corner * spatial_scale + 0.5)", "op.Round(corner * spatial_scale)"),
        ("DeformConv", "steps[i] * window.dilations[i] - ", "steps[i] - "),
    ),
    *of(
        "recurrent.py",
        ("GRU", "op.Pad(zr, [0, n])", "op.Pad(zr, [n, 0])"),
        ("LSTM", "forget + pf * c", "forget + pi * c"),
        ("LSTM", "None if i % count == 2 else clip", "clip"),
        ("", "[slices[1] * following[0]]", "following[:1]"),
        ("", "(rest, first) if backwards else (first, rest)", "(first, rest)"),
        tests="test_recurrent.py",
    ),
    *of(
        "../walk.py",
        ("", "gradients.pop(x, None) for x in inputs", "gradients.get(x) for x in inputs"),
        tests="test_recurrent.py",
    ),
    *of(
        "control_flow.py",
        ("", "like(total + derivatives[x], x)", "derivatives[x]"),
        ("", "reverse = [1 - direction for direction in directions]", "reverse = list(directions)"),
        ("", "(end_, dy_, axis, 1 - direction)", "(end_, dy_, axis, direction)"),
        ("", "at = inner.Sub(last, turn)", "at = turn"),
        ("", "like(total[y] + dy, y) if y in total else dy", "dy"),
        tests="test_control_flow.py",
    ),
    *of(
        "../../losses/classification.py",
        ("", "* q + whole * share", "* q + share"),
        ("", "[self.axis]), self.ignore_index))", "[self.axis]), 0))"),
        tests="test_losses.py",
    ),
    *of(
        "linear.py",
        ("DFT", "back / count if inverse else back * count", "back * count"),
        ("DFT", "op.Unsqueeze(2 - once,", "op.Unsqueeze(1 + once,"),
    ),
]


def unnoticed(mutants: list[Mutant]) -> list[Mutant]:
    """Try mutants in a copy of the tree and return those that no test notices; print what notices the others."""
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("graphopt", "passes", "recipes", "tests", "pyproject.toml"):
            source = ROOT / part
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / part)
        for mutant in mutants:
            path = copy / mutant.path
            right = path.read_text()
            path.write_text(mutant.mutated())
            found = tested(copy, mutant)
            path.write_text(right)
            if found is None:
                survivors.append(mutant)
            print(f"{'NOT NOTICED' if found is None else 'noticed'}: {mutant}\n    {found}", flush=True)
    return survivors


def tested(folder: Path, mutant: Mutant) -> str | None:
    """Return the line of the test that fails, None where all pass.

    Raises:
        ValueError: pytest ran no test.
    """
    cases = " or ".join(f"[{name}- or -{name}-" for name in mutant.operators.split())
    chosen = mutant.chosen or cases
    arguments = [
        "-x",
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        "-m",
        "not exhaustive",
        f"tests/{mutant.tests}",
        *(["-k", chosen] if chosen else []),
    ]
    report = folder / "report"
    variables = {VARIABLE: mutant.precision} if mutant.precision else {}
    process = PROCESSES.Process(target=run_pytest, args=(str(folder), arguments, str(report), variables))
    process.start()
    process.join()
    lines = report.read_text().splitlines()
    if process.exitcode not in (0, 1):
        raise ValueError(f"{mutant}: {lines[-20:]}")
    return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "?") if process.exitcode else None


def run_pytest(folder: str, arguments: list[str], report: str, variables: Mapping[str, str]) -> None:
    """Run tests of a copy of the tree in this process, and end it with pytest's exit status."""
    os.chdir(folder)
    os.environ.update(variables)
    os.environ["XDG_CACHE_HOME"] = str(Path(folder, "cache"))  # compiled kernels, by a digest that may lack a change
    sys.path.insert(0, folder)
    with open(report, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        import pytest

        status = int(pytest.main(arguments))
    sys.exit(status)


if __name__ == "__main__":
    numbers = [int(number) for number in sys.argv[1:]] or range(len(MUTANTS))
    left = unnoticed([MUTANTS[number] for number in numbers])
    print(f"{len(numbers) - len(left)} of {len(numbers)} noticed")
