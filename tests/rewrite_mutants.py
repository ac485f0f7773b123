"""Wrong rewritings: each a line changed of what fuses, simplifies, lowers or splits a graph, or chooses what trains.

`python tests/rewrite_mutants.py [NUMBER ...]` tries them, prints what each is noticed by, and those that are not.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mutants import Mutant, unnoticed


def of(file: str, tests: str, *rows: tuple[str, str, str]) -> list[Mutant]:
    """Return mutants of a file: for each, which tests of a file notice it, and the change."""
    return [Mutant(file, "", old, new, f"test_{tests}.py", chosen, Path()) for chosen, old, new in rows]


FUSIONS = [
    *of(
        "graphopt/targets/onnxruntime/fuse.py",
        "fusion",
        ("moves_each_weight", "                    model.graph.sort()", "                    pass"),
    ),
    *of(
        "graphopt/graph/blocks.py",
        "blocks",
        ("stay", "math.prod(_shape(node.outputs[0])[: axis", "math.prod(_shape(node.outputs[0])[:0 * axis"),
        ("stay", "if not is_whole or (in_order", "if (in_order"),
        ("parts_are", "max(start + shape[axis] if start < 0 else start, 0)", "max(start, 0)"),
    ),
    *of(
        "graphopt/targets/updates.py",
        "training_matrix",
        (
            "plain_descent",
            "scale = rate * -constant",
            "scale = rate * constant",
        ),
    ),
    *of(
        "graphopt/targets/updates.py",
        "fusion",
        ("scaled_gradients", "JOINTLY_LINEAR and all(scaled)", "JOINTLY_LINEAR and any(scaled)"),
        ("scaled_gradients", "len(rates) != 1", "len(rates) < 1"),
        (
            "scaled_gradients",
            "return [] if any(x.is_graph_output() for x in scaled) else ends",
            "return ends",
        ),
    ),
    *of(
        "graphopt/targets/onnxruntime/convolution.py",
        "fusion",
        ("other_forms or model_is_one_again", "np.eye(math.prod(taps))[::-1]", "np.eye(math.prod(taps))"),
        ("other_forms", "strides=[*window.strides, 1],", "strides=[*window.dilations, 1],"),
        ("gradients_of_any_window", "        strides=window.dilations,", "        strides=window.strides,"),
        ("gradients_of_any_window", "range(0, places * stride, stride)", "range(places)"),
    ),
    *of(
        "graphopt/targets/onnxruntime/convolution.py",
        "training_matrix",
        ("plain_descent", "[-1, 1, *sizes[2:]]", "[-1, 1, sizes[3], sizes[2]]"),
    ),
    *of(
        "graphopt/targets/onnxruntime/convolution.py",
        "fusion",
        ("unpooled", "op.Range(size, 0, -1)", "op.Range(1, size + 1, 1)"),
        ("unpooled", "op.Size(planes) + size, size)", "op.Size(planes) + size, 1)"),
    ),
    *of(
        "graphopt/targets/updates.py",
        "fusion",
        (
            "gemm_can_do",
            '1 - flags["transB"], transB=1 - flags["transA"]',
            '1 - flags["transA"], transB=1 - flags["transB"]',
        ),
        ("unfused_graph or plain_descent", "minus = like(op.Neg(scalar), scalar)", "minus = scalar"),
        (
            "unfused_graph",
            "beta=constant_number(scalar)",
            "beta=1.0 - constant_number(scalar)",
        ),
        ("looks_like", "_alpha(g) == 1.0", "True"),
    ),
    *of(
        "graphopt/graph/simplify.py",
        "fusion",
        ("plain_descent or scaled_gradients", "op.Mul(like(op.Mul(s, t), s), x)", "op.Mul(s, x)"),
        ("looks_like", "constant_number(two) == 2", "True"),
        ("masked_after_pooling", "like(op.HardSigmoid(p,", "like(op.HardSigmoid(share,"),
        ("gelu", "stand_in(node, [op.Mul(x, share)])", "stand_in(node, [op.Mul(share, share)])"),
    ),
    *of(
        "graphopt/targets/onnxruntime/vectors.py",
        "fusion",
        ("looks_like", "in ([0], [-2])", "in ([0], [-2], [1], [-1])"),
    ),
    *of(
        "graphopt/targets/portable/cuda.py",
        "portable_forms",
        ("same_values and gradient", "padded = [size + sum(pads)", "padded = [size + pads[0]"),
        (
            "same_values and gradient",
            "_positions(places, window.dilations, padded)",
            "_positions(places, window.strides, padded)",
        ),
        ("same_values and gradient", "[0, group, filters // group, -1]", "[0, filters // group, group, -1]"),
        ("same_values and split", "end = start + count * size", "end = start + size"),
        ("same_values and Reduce", "if axis < last]", "if axis <= last]"),
        ("same_values and stacks", "m == 1 != n for m, n in pairs", "False for m, n in pairs"),
    ),
    *of(
        "graphopt/targets/check.py",
        "state_check",
        ("not_state", "or ends[-1:] != [*(x.shape or ())]", ""),
        ("not_state", "ends[:-1] != [start for start, _ in spans]", "False"),
        ("not_state", "set(_parts(root)) <= set(bare.values())", "True"),
    ),
    *of(
        "graphopt/targets/scan.py",
        "scan_fusion",
        ("its_own_way", "if first and first.direction == second.direction else", "if first else"),
        ("parted", "rows[a].direction != rows[b].direction", "False"),
        ("parted", "axis if axis < 0 else axis + 1", "axis"),
        ("parted", "len(directions) != 1", "len(directions) < 1"),
    ),
]

SIMPLIFYING = [
    *of(
        "graphopt/graph/simplify.py",
        "regularizers_and_clipping",
        ("global_norm", "constant_number(one) == 1", "True"),
    ),
    *of(
        "graphopt/graph/rewriting.py",
        "optimizers",
        ("takes_pytorchs_steps", "            with detached(model):", "            if True:"),
    ),
    *of(
        "graphopt/graph/rewriting.py",
        "unroll",
        ("names_differ", "                    fix_names(model)\n", ""),
    ),
    *of(
        "graphopt/graph/folding.py",
        "folding",
        ("weights_are_not_folded", "not weights.isdisjoint(node.inputs)", "False"),
    ),
]

NATIVE = [
    *of(
        "graphopt/targets/native/products.py",
        "native_products",
        ("is_the_runtimes", '[1, 0] if attributes.get("transB")', '[1, 0] if attributes.get("transA")'),
        ("is_the_runtimes", "-1 if bias is None else rank_of(bias)", "-1"),
        ("is_the_runtimes", "b, transposed(axes_b), a, transposed(axes_a)", "b, axes_b, a, axes_a"),
        ("scaled_products", 'attributes.get("alpha", 1.0) == attributes', "attributes"),
    ),
    *of(
        "graphopt/targets/native/operators.py",
        "native_kernels",
        ("extremes", '"maximum": ("-INFINITY",', '"maximum": ("0",'),
        ("test_random_clusters", '"Where": "{0} ? {1} : {2}"', '"Where": "{0} ? {2} : {1}"'),
        ("extremes", '"rint{F}({0})"', '"round{F}({0})"'),
        ("test_random_clusters", '"{0} / ({C})AT_LEAST_1({N})"', '"{0} / ({C})(AT_LEAST_1({N}) + 1)"'),
    ),
    *of(
        "graphopt/targets/native/channels.py",
        "native_channels",
        ("pytorchs", "stride = plane * a->rows", "stride = plane"),
        ("pytorchs", "own < columns", "own + plane < columns"),
    ),
    *of(
        "graphopt/targets/native/normalizations.py",
        "native_channels",
        ("pytorchs", "swap(y, like(results[0], y))", "pass"),
    ),
    *of(
        "graphopt/targets/native/convolutions.py",
        "native_convolutions",
        ("random_convolutions_are", "window.begin, end, more", "window.end, end, more"),
        ("random_convolutions_are", "int(bias is not None), int(relu)", "int(bias is not None), 0"),
        ("training_step_is_the_plain", "[pad - n for pad, n in", "[pad for pad, n in"),
    ),
    *of(
        "graphopt/targets/native/scans.py",
        "native_scans",
        ("is_the_runtimes", "[x.direction for x in scan.inputs]", "[0 for x in scan.inputs]"),
        ("is_the_runtimes", "((y.row, y.direction) for y in", "((y.row, 0) for y in"),
    ),
    *of(
        "graphopt/targets/native/new_state.py",
        "native_in_place",
        ("wait", "in waits.items() if values]", "in waits.items() if False]"),
        (
            "something_else_returns",
            "return None if x.is_graph_output() else readers",
            "return readers",
        ),
    ),
]

SPLITTING = [
    *of(
        "graphopt/graph/unroll.py",
        "unroll",
        (
            "single_steps",
            "carried = [x for x in graph.inputs if x.name in following]",
            "carried = [x for x in graph.inputs if x.name in following][:-1]",
        ),
        ("random_numbers", " or node.op_type in RANDOM", ""),
    ),
    *of(
        "passes/parts/halves.py",
        "halves",
        ("twins_compute", "redirect(users, scaled)", "redirect(users, x)"),
    ),
    *of(
        "passes/parts/halves.py",
        "batch_statistics",
        (
            "unequal_rows",
            "rows: ir.Value = op.Squeeze(op.Shape(data, start=0, end=1), [0])",
            "rows: ir.Value = op.Squeeze(op.Shape(data, start=1, end=2), [0])",
        ),
    ),
    *of(
        "graphopt/targets/portable/normalizations.py",
        "portable_forms",
        (
            "same_values",
            "op.ReduceMean(op.Mul(centered, centered), axes)",
            "op.ReduceSum(op.Mul(centered, centered), axes)",
        ),
    ),
    *of(
        "graphopt/targets/portable/webgpu/layout.py",
        "portable_forms",
        (
            "same_values",
            "itertools.accumulate(sizes, initial=0)",
            "itertools.accumulate(sizes[::-1], initial=0)",
        ),
    ),
    *of(
        "passes/mixed_precision.py",
        "mixed_precision",
        ("range", "bool(np.max(np.abs(numbers), initial=0) <= self._dtype.max)", "True"),
        ("not_finite", "kept = op.Where(finite, y, x)", "kept = y"),
        ("stays_wide", "bool(read) and self._made.issuperset(read)", "bool(read)"),
    ),
    *of(
        "passes/recompute.py",
        "recompute",
        ("drawn_once", "or node.op_type in RANDOM or", "or"),
        ("agrees", "op.Less(op.Abs(whole), 0.0)", "op.Less(whole, 0.0)"),
    ),
    *of(
        "passes/accumulate.py",
        "accumulate",
        ("sum_of_gradients", "total / op.Cast(done, to=total.dtype) if self.mean else total", "total"),
    ),
    *of(
        "passes/lowering/contrib.py",
        "lowering",
        ("computes_what", "x * op.Sigmoid(alpha * x)", "x * op.Sigmoid(x)"),
        ("computes_what", "y if alpha == 1 else alpha * y", "y"),
    ),
]

CHOOSING = [
    *of(
        "passes/parameters.py",
        "weights",
        ("says_otherwise", "        if selects(self.freeze, value):\n", "        if False:\n"),
        (
            "says_otherwise",
            "selects(self.unfreeze, value) or selects(self.pattern, value):",
            "selects(self.pattern, value):",
        ),
        ("tied", "for group in folds.groups(chosen):", "for group in []:"),
        ("equal_fresh", "or not folds.tells(weight)", ""),
        ("untie", "list(value.uses())[1:]", "list(value.uses())[2:]"),
    ),
    *of(
        "passes/parameters.py",
        "weights",
        ("statistics", "index in (3, 4)", "index in (3,)"),
    ),
    *of(
        "passes/weights/folds.py",
        "weights",
        (
            "tied or transposes",
            "    perm = _permutation(a, b)\n",
            "    perm = None\n",
        ),
    ),
    *of(
        "passes/weights/evidence.py",
        "weights",
        ("constants_are_told", "and low <= _MASKING and", "and low < -1e30 and"),
        ("constants_are_told", "(np.abs(products) < 2 * squares).all()", "(np.abs(products) < 0 * squares).all()"),
    ),
]

SURE = [
    *of(
        "passes/conformal.py",
        "calibration",
        (
            "coverage_over_splits",
            "return float(np.sort(scores)[k - 1])",
            "return float(np.quantile(scores, 1 - self.alpha))",
        ),
        ("coverage_over_splits", "(len(scores) + 1) * (1 - self.alpha)", "len(scores) * (1 - self.alpha)"),
        ("kth_smallest_excess", '"upper": high + margin', '"upper": high - margin'),
        ("sets_are_those", "if not self.by_class", "if self.by_class"),
        ("sets_are_those", "exclusive=1, reverse=1)", "reverse=1)"),
        ("sets_are_those", "op.ScatterElements(less_likely, order, less_likely, axis=1)", "less_likely"),
    ),
    *of(
        "graphopt/training/calibrate.py",
        "calibration",
        ("numbers_that_the_file", "return relabelled(data, names, data.source)", "return data"),
        ("may_be_others", "{*names} & {*map(str, range(len(names)))}", "set()"),
    ),
    *of(
        "graphopt/graph/inference.py",
        "executor",
        ("are_one_value", "with interface_kept(extracted), protect", "with protect"),
    ),
    *of(
        "graphopt/cli/rows.py",
        "calibration",
        ("rows_that_it_held_out", 'run in ("calibrate", "evaluate")', 'run == "evaluate"'),
        ("rows_that_it_held_out", "wanted is None and held_out is None", "False"),
    ),
    *of(
        "passes/calibration.py",
        "calibration",
        (
            "softmax_is_applied_once",
            "scores, axis = Scores(y, given(node.inputs[0]), node.op_type, noted),",
            "scores, axis = Scores(y, y, None, noted),",
        ),
        ("platts_line", "scores.emit_rates(op, z) if scores.logits is None else z", "z"),
    ),
    *of(
        "passes/uncertainty.py",
        "uncertainty",
        (
            "pytorchs_hessian",
            "np.ones((len(x), len(weight) - x.shape[1]))",
            "np.zeros((len(x), len(weight) - x.shape[1]))",
        ),
        ("not_certain", "to=ir.DataType.DOUBLE", "to=ir.DataType.FLOAT"),
        ("all_masks", "ratio_of(node), at[0],", "ratio_of(node), at[0] * 0,"),
        ("prior_makes", "(precision + found)).sum()) / square", "(precision + found)).sum() + 1) / square"),
    ),
]

MUTANTS = [*FUSIONS, *SIMPLIFYING, *NATIVE, *SPLITTING, *CHOOSING, *SURE]

if __name__ == "__main__":
    numbers = [int(number) for number in sys.argv[1:]] or range(len(MUTANTS))
    left = unnoticed([MUTANTS[number] for number in numbers])
    print(f"{len(numbers) - len(left)} of {len(numbers)} noticed")
