"""Faults in the newest rooms: language, tables, generation, callbacks, batches, portable forms, pools and hosts.

`python tests/room_mutants.py [NUMBER ...]` tries them, prints what each is noticed by, and those that are not.
"""

from __future__ import annotations

import sys

from mutants import unnoticed
from rewrite_mutants import of

FAULTS = "room_faults"

QUANTIZATION = "fake_quantize"

PRIVATE = "private"

MUTANTS = [
    *of(
        "passes/second_pass.py",
        "second_pass",
        ("sharpness_aware", "places.values())", "[*first])\n        places = {w: w for w in first}"),
        ("sharpness_aware", "like(w + (", "like(w - ("),
        ("sharpness_aware", "redirect(uses, places[w])", "pass"),
        ("sharpness_aware", "self.rho / (norm + 1e-12)", "self.rho"),
        ("adversarial", "(1 - self.share) * clean", "clean"),
    ),
    *of(
        "passes/private.py",
        PRIVATE,
        ("clipped_means and dense", "op.Min(bound / (norms + 1e-6), 1.0)", "op.Min(bound / bound, 1.0)"),
        ("clipped_means and dense", "bound / (norms + 1e-6)", "bound / (op.ReduceMean(norms) + 1e-6)"),
        ("noise_is_normal", "/ inputs[EXPECTED_ROWS]", "/ inputs[EXPECTED_ROWS] / inputs[EXPECTED_ROWS]"),
        ("noise_is_normal", "= state.counter(model)", "= op.constant(0)"),
        ("noise_is_normal", "number + i, key)", "number + i)"),
    ),
    *of(
        "graphopt/graph/randomness.py",
        PRIVATE,
        ("noise_is_normal", "radius * (sine * op.Sqrt(2 - double))", "y"),
        ("box_and_muller", "-1.6666654611e-1", "-1.65e-1"),
    ),
    *of(
        "passes/uncertainty.py",
        "uncertainty",
        ("beyond_the_rank", "axes[..., :count].transpose", "axes[..., -count:].transpose"),
        ("beyond_the_rank", "v[:, ::-1][:, :count]", "v[:, :count]"),
    ),
    *of(
        "passes/gradients/examples.py",
        PRIVATE,
        (
            "clipped_means and tied",
            "total = gradient if total is None else total + gradient",
            "total = gradient",
        ),
        ("clipped_means and convolutions", "op.cast(weights, flat.dtype)", "op.cast(op.Ceil(weights), flat.dtype)"),
        ("clipped_means and dense", 'if BATCH_WEIGHT.read(y) == "rows":', "if False:"),
        ("clipped_means and shared", "op.Sum(*pairs) if others else pairs[0]", "pairs[0]"),
        ("whose_recurrent", "is_whole and {part.source for part in parts_of(site.operand)} == {w}", "is_whole"),
    ),
    *of(
        "passes/quantization/fake_quantize.py",
        QUANTIZATION,
        ("pytorchs", "self._round_bias(given(bias), flat, step * scale, is_shared)", "bias"),
        ("pytorchs", "scale = STOP_GRADIENT.mark(op.Max(step, _LEAST))", "scale = op.Max(step, _LEAST)"),
        ("pytorchs", "op.Round(op.Neg(least) / ", "op.Floor(op.Neg(least) / "),
        ("pytorchs", '{"axis": product.axis}', '{"axis": 1 - product.axis}'),
        ("pytorchs", "STOP_GRADIENT.mark(rounded) + passed", "STOP_GRADIENT.mark(rounded) + 2 * passed"),
        ("recurrences", "op.ReduceMax(op.Abs(w), axes, keepdims=0)", "op.ReduceMax(w, axes, keepdims=0)"),
    ),
    *of(
        "passes/quantization/placement.py",
        QUANTIZATION,
        ("recurrences", "node.op_type in RECURRENT and shape[0] != 1", "False"),
    ),
    *of(
        "graphopt/adapters/targets.py",
        QUANTIZATION,
        ("adapters", "replace(kind, x=None)", "kind"),
        (
            "merged_weights",
            "list(w.uses()) if source.unrounded is not None else [(node, index)]",
            "[(node, index)]",
        ),
    ),
    *of(
        "passes/quantization/observers.py",
        QUANTIZATION,
        ("evaluates", "InferenceForm(inputs={0: name_of(old)}).write(reader.outputs[0])", "pass"),
        ("pytorchs", "(1 - observer.momentum) * seen", "observer.momentum * seen"),
        ("gradients", "math.sqrt(count * _LEVELS)", "math.sqrt(_LEVELS)"),
    ),
    *of(
        "passes/quantization/fold.py",
        QUANTIZATION,
        ("folding", "(np.ravel(start) - mean)", "(np.ravel(start) + mean)"),
        ("folding", "factor.reshape(groups, -1)", "factor.reshape(-1, groups).T"),
    ),
    *of(
        "graphopt/data/language/documents.py",
        FAULTS,
        ("completion", "inside[ended.size - 1 :] |= ended[-1:] == vocabulary.end", "pass"),
        ("completion", "(places[:, 1] > start)", "(places[:, 1] >= start)"),
        ("completion or chat", "(places[:, 0] < end)", "(places[:, 0] <= end)"),
        ("completion or chat", "special=not is_ended", "special=True"),
        ("document", "and tokens[-1] == vocabulary.end)", "and False)"),
        ("chat", "inside |= (places", "inside = (places"),
    ),
    *of(
        "graphopt/data/columns.py",
        FAULTS,
        ("constant", "divisor >= 10 * np.finfo(np.float64).eps", "divisor > 0"),
        ("constant", "divisor >= 10 * np.finfo(np.float64).eps", "divisor >= 100 * np.finfo(np.float64).eps"),
        ("constant", "filled.min(), np.ptp(filled)", "filled.min(), filled.max()"),
        ("date", "np.rint(there.mean())", "np.floor(there.mean())"),
        ("date", "np.rint(there.mean())", "np.ceil(there.mean())"),
        ("category", "numbers.get(text, -1)", "numbers.get(text, 0)"),
        (
            "category",
            "key=lambda text: (-counts[text], _category_order(text))",
            "key=lambda text: _category_order(text)[::-1]",
        ),
        (
            "category",
            "key=lambda text: (-counts[text], _category_order(text))",
            "key=lambda text: counts[text]",
        ),
        ("marked", "np.isnan(values)] if self.add_indicator", "~np.isnan(values)] if self.add_indicator"),
        ("marked", '"median": np.median', '"median": np.mean'),
    ),
    *of(
        "graphopt/generation/sampling.py",
        FAULTS,
        ("top_p", "[:-1] <= 1 - self.top_p", "[:-1] < 1 - self.top_p"),
        ("top_p", "[:-1] <= 1 - self.top_p", "[:-1] <= self.top_p"),
        ("top_p", "return rates / rates.sum()", "return rates"),
        ("temperature", "/ self.temperature", "* self.temperature"),
        ("temperature", "scores < np.partition", "scores <= np.partition"),
        ("temperature", "np.partition(scores, -self.top_k)[-self.top_k]", "np.sort(scores)[self.top_k]"),
    ),
    *of(
        "graphopt/generation/decoder.py",
        FAULTS,
        ("mask", "+ count + filled) < before + count", "+ count + filled) <= before + count"),
        ("mask", "+ count + filled) < before + count", "+ count + filled) < count"),
        ("mask", "np.arange(before, before + count + filled)", "np.arange(0, count + filled)"),
        ("mask", "np.pad(tokens, ((0, 0), (0, filled)))", "np.pad(tokens, ((0, 0), (filled, 0)))"),
        ("anew", "np.concatenate([self._tokens, tokens], axis=1)", "tokens"),
        (
            "anew",
            "        self._tokens = np.zeros((rows, 0), np.int64)",
            "        self._tokens = getattr(self, '_tokens', np.zeros((rows, 0), np.int64))",
        ),
        ("anew", "_last(outputs[name], *seen.shape)", "_last(outputs[name], len(seen), 1) * -1"),
    ),
    *of(
        "graphopt/generation/text.py",
        FAULTS,
        ("anew", "        self._decoder.clear(len(prompts))\n", ""),
        ("anew", "read = np.array(tokens, np.int64)[:, None]", "read = np.c_[read, tokens]"),
    ),
    *of(
        "graphopt/training/callbacks/steering.py",
        FAULTS,
        ("adaptive", "self.least - self.tolerance", "self.least + self.tolerance"),
        ("adaptive", "self.least = min(self.least, loss)", "self.least = loss"),
        ("adaptive", "self.waited >= self.patience and", "self.waited > self.patience and"),
        ("adaptive", "            self.waited = 0\n\n\n", "            pass\n\n\n"),
        ("adaptive", "learning_rate /= ADAPTIVE_DIVISOR", "learning_rate /= 4"),
        ("plateau", "executor.learning_rate * self.factor,", "executor.learning_rate * self.factor**2,"),
    ),
    *of(
        "graphopt/data/loader.py",
        FAULTS,
        ("epoch", "(random.permutation(rows) if shuffle", "(random.choice(rows, len(rows)) if shuffle"),
        ("epoch", "in random.permutation(len(batches))", "in random.choice(len(batches), len(batches))"),
        ("neighbouring", "-random.integers(len(rows))", "0"),
        ("epoch", "yield batches[i][start:]", "yield batches[i]"),
        ("epoch", "start = max(start - len(batches[i]), 0)", "start = 0"),
        ("epoch", "math.ceil(len(self._data) / self._batch_size)", "len(self._data) // self._batch_size"),
        ("held_out", "count = math.ceil(rows * share)", "count = int(rows * share)"),
        ("held_out", "np.delete(np.arange(rows), chosen), chosen", "np.arange(rows), chosen"),
        ("held_out", "range(rows - count), range(rows - count, rows)", "range(rows - count), range(rows)"),
    ),
    *of(
        "graphopt/targets/portable/webgpu/arithmetic.py",
        FAULTS,
        ("halves", "op.Greater(half, op.Floor(half))", "op.Less(op.Floor(half), op.Floor(half))"),
        ("halves", "op.And(op.Equal(rest, 0.5), odd)", "op.Equal(rest, 0.5)"),
        ("halves", "op.Greater(rest, 0.5), op.And", "op.Greater(rest, 0.75), op.And"),
        ("halves", "op.Where(op.Greater(rest, 0.0), low, x)", "x"),
    ),
    *of(
        "graphopt/targets/portable/webgpu/pools.py",
        FAULTS,
        (
            "channels",
            "before, after = (size - 1) // 2, size // 2",
            "before, after = size // 2, (size - 1) // 2",
        ),
        ("channels", 'numbers("alpha", 1e-4) / size', 'numbers("alpha", 1e-4)'),
        (
            "channels",
            "pads[1], pads[rank(x) + 1] = before, after",
            "pads[1], pads[rank(x) + 1] = after, before",
        ),
        ("channels", 'numbers("beta", 0.75)', 'numbers("bias", 0.75)'),
    ),
    *of(
        "graphopt/targets/native/pools.py",
        "native_pools",
        ("other_scores", "np.array_equal(found, np.tile(taps, repeats))", "True"),
        ("other_scores", "np.array_equal(pattern, taps)", "True"),
        ("formula", "most.inputs[0] is not score", "False"),
        (
            "formula",
            "not any(each in nodes for each in (x.producer(), y.producer(), share.producer()))",
            "True",
        ),
        ("gate", "mask.inputs[0] is y", "True"),
        ("read_elsewhere", "and _stays_inside(nodes)", ""),
    ),
    *of(
        "graphopt/hosts/c/graphopt.c",
        "hosts_c",
        ("hostile", "y.type == x->type && (is_number || y.rank == x->rank)", "1"),
        ("hostile", "y.dims[i] == (is_number ? 1 : x->dims[i])", "1"),
        ("hostile", "return check_made(t, g);", "return GRAPHOPT_OK;"),
        ("hostile", "if (!has_loss) return", "if (!has_loss && 0) return"),
        ("hostile", "begin > end || end > size - 8 - header", "begin > end"),
    ),
    *of(
        "passes/differentiate.py",
        "derivatives",
        ("jacobian_is", "perm=[1, 0, *range(2, rank(x) + 1)]", "perm=[0, 1, *range(2, rank(x) + 1)]"),
        (
            "forward_pass",
            "_gradients(op, graph, y, seed, wrt, zero=True)",
            "[zeros(op, elsewhere(op, between(graph, [y], wrt), {})[y])] + _gradients(op, graph, y, seed, wrt)[1:]",
        ),
        ("no_rows", "op.Concat([-1], op.shape_of(y, 1), axis=0)), y)", "op.shape_of(y)), y)"),
    ),
    *of(
        "passes/prune.py",
        "prune",
        (
            "loop_in_pytorch",
            "op.Where(new[w], y, ",
            "op.Where(masks[w], y, ",
        ),  # not after momentum's last step
        ("loop_in_pytorch", "op.Where(new[w], y, ", "op.Where(op.Or(new[w], masks[w]), y, "),
        ("zeros_stay", "for x in [w, *filter(_Copy(w), owners.get(name_of(w), ()))]", "for x in [w]"),
        ("zeros_stay", "op.Where(new[w], y, op.constant(0.0, like=x))", "op.Identity(y)"),  # before decay
        ("masks_are", "round((self.sparsity or", "int((self.sparsity or"),
        ("neighbours", "last=axis)", "last=1 - axis)"),
    ),
    *of(
        "graphopt/graph/channels.py",
        "prune",
        ("half_of", "self._join(labels, others)", "pass"),
        ("have_to_stay", "self._pin(x, f", "str(f"),
        ("constant_added", "math.prod(map(int, dims)) != dims[axis] or not self._slice(", "self._slice("),
        ("two_readers", "if (node, index) not in self._read:", "if False:"),
    ),
    *of(
        "graphopt/graph/windows.py",
        "windows",
        (
            "gradient",
            'if mode == "SAME_UPPER" else (more, less)',
            'if mode == "SAME_LOWER" else (more, less)',
        ),
        ("gradient", "np.arange(self.kernel[axis]) * self.dilations[axis]", "np.arange(self.kernel[axis])"),
        ("gradient", "(self.begin[axis], self.end[axis]) if with_pads", "(self.begin[axis], 0) if with_pads"),
        ("refused", "window.extent != window.kernel or ", ""),
    ),
    *of(
        "passes/lowering/qoperators.py",
        "integer_files",
        ("in_pytorch", '"Conv": 0, "Gemm": 1', '"Conv": 1, "Gemm": 1'),
        ("in_pytorch", 'op_type == "Gemm" and attributes.get("transB")', "False"),
        ("in_pytorch", "* scales[0] * scales[1]", "* scales[1]"),
        ("other_operators", "op.DequantizeLinear(fill, scale, zero)", "op.DequantizeLinear(fill, scale)"),
        ("other_operators", 'axis=attributes.pop("axis", 1)', 'axis=attributes.pop("axis", 1) * 0 + 1'),
    ),
    *of(
        "passes/lowering/integers.py",
        "integer_files",
        ("an_lstm", ", like, read=rounded)", ", like)"),
        ("an_lstm", '{"axis": 2} if', '{"axis": 0} if'),
        ("added_as_integers", "op.Floor(bias / fixed)", "op.Round(bias / fixed)"),
    ),
    *of(
        "passes/lowering/integers.py",
        "integer_products",
        ("masters", "FOLLOWS.mark(weight) if by == (scale, zero) else weight", "weight"),  # an old scale
        (
            "masters",
            "_weight(op, b, scale, b_zero_point, rank(b) - 1)",
            "_weight(op, b, scale, b_zero_point, 0)",
        ),
        ("two_inputs", "return _rounded(op, w, zero, scale)", "return op.DequantizeLinear(w, scale)"),
    ),
    *of(
        "passes/weights/masters.py",
        "integer_products",
        ("masters", "op.Round(least / new)", "op.Floor(least / new)"),
        ("masters", "STORED_AS.write(producer_of(new), name_of(scale))", "pass"),
        ("masters", "np.abs(w).max(axes)", "np.abs(w).max()"),
        ("masters", "STOP_GRADIENT.mark(STORED.mark(grown))", "STORED.mark(grown)"),
    ),
    *of(
        "graphopt/graph/original.py",
        "integer_products",
        ("masters", "changed |= {name for node in model.graph if (name := STORED_AS.read(node))}", "pass"),
    ),
    *of("graphopt/graph/original.py", "integer_files", ("of_4_bits", "return not is_same and", "return")),
    *of(
        "graphopt/runtime/checks/file.py",
        "integer_files",
        (
            "half_way",
            "for arrays in _off_ties(device, part, given, unit))",
            "for arrays in ())",
        ),
    ),
    *of(
        "passes/low_rank.py",
        "prune",
        ("filters", "node.attributes.clear()", "pass"),
        ("filters", "a.T.reshape(rank", "a.reshape(rank"),
    ),
    *of(
        "passes/gradients/rules/recurrent.py",
        PRIVATE,
        ("recurrent_layers and GRU", "of_x[2] * f(op, like(reset, states))", "of_x[2]"),
        ("recurrent_layers and LSTM", "of_x = [own[place] for place in order]", "of_x = [*own]"),
    ),
    *of(
        "passes/quantization/fake_quantize.py",
        QUANTIZATION,
        ("tied", "self._straight(self._floats(q, scale, zero), x)", "x"),
    ),
    *of("passes/quantization/placement.py", QUANTIZATION, ("something_else", "return []  # or it", "pass  # or it")),
]

if __name__ == "__main__":
    numbers = [int(number) for number in sys.argv[1:]] or range(len(MUTANTS))
    left = unnoticed([MUTANTS[number] for number in numbers])
    print(f"{len(numbers) - len(left)} of {len(numbers)} noticed")
