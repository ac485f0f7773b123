"""Values at the edges of the newest rooms, by hand or by another library: what `tests/room_mutants.py` gets wrong."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
from builders import model
from sklearn.preprocessing import MinMaxScaler, OrdinalEncoder

import graphopt
import passes
from graphopt import callbacks
from graphopt.data.language.documents import _documents, _marked
from graphopt.data.loader import Loader, draw, hold_out
from graphopt.generation.decoder import DecoderInputs
from graphopt.generation.sampling import Sampling
from graphopt.graph.shapes import infer

# --- Language ---


class Letters:
    """A tokenizer of letters, whose token 0 ends a text; `special` adds it."""

    end = 0

    def __init__(self, adds_end: bool) -> None:
        self.adds_end = adds_end

    def encoded(self, texts, special=True):
        for text in texts:
            tokens, places = [ord(c) for c in text], [(i, i + 1) for i in range(len(text))]
            if self.adds_end and special:
                tokens, places = [*tokens, 0], [*places, (0, 0)]
            yield np.array(tokens, np.int32), np.array(places).reshape(-1, 2)


@pytest.mark.parametrize("adds_end", [True, False])
def test_the_end_of_a_completion_is_a_target_whoever_adds_it(adds_end):
    found = _marked(["abcd"], [[(2, 4)]], Letters(adds_end), True, is_ended=False)
    assert found.tokens[0].tolist() == [97, 98, 99, 100, 0]
    assert found.counted[0].tolist() == [False, False, True, True, True]


def test_a_chat_has_the_end_that_its_template_writes():
    found = _marked(["abcd"], [[(1, 2), (3, 4)]], Letters(True), True, is_ended=True)
    assert found.tokens[0].tolist() == [97, 98, 99, 100]
    assert found.counted[0].tolist() == [False, True, False, True]


@pytest.mark.parametrize("adds_end", [True, False])
def test_a_document_ends_once(adds_end):
    found = _documents(["ab"], Letters(adds_end))
    assert found.tokens[0].tolist() == [97, 98, 0] and found.counted[0].all()


# --- Tables ---


@pytest.mark.parametrize("width", [0.0, 1e-16, 2.2e-15, 2.3e-15, 1e-10, 2.0])
def test_a_range_is_constant_where_scikit_learn_says_so(width):
    numbers = np.array([0.0, width, width / 2])
    column = graphopt.data.Number(scale="minmax").learn(numbers)
    assert column.divisor == 1 / MinMaxScaler().fit(numbers[:, None]).scale_[0]
    shifted = graphopt.data.Number(scale="minmax").learn(np.array([5.0, 2.0, 3.0]))
    assert (shifted.offset, shifted.divisor) == (2.0, 3.0)


@pytest.mark.parametrize(("days", "fill"), [([0, 1, 1], 1), ([0, 0, 1], 0), ([-1, -1, 0], -1), ([0, 3], 2)])
def test_a_missing_date_is_the_nearest_day_to_the_mean(days, fill):
    column = graphopt.data.Date(["days"]).learn(np.array([*days, np.nan], float))
    assert column.fill == fill


def test_an_unknown_category_is_minus_one_and_the_most_frequent_fills():
    column = graphopt.data.Category(encode_as="ordinal", impute="most_frequent").learn(
        np.array(["b", "a", "b", "a", "c", ""], object)
    )
    cells = np.array(["a", "b", "c", "d", ""], object)
    encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1).fit([["a"], ["b"], ["c"]])
    expected = encoder.transform(np.where(cells == "", "a", cells)[:, None])  # the first of the most frequent
    np.testing.assert_array_equal(column.encode(cells), expected)
    often = graphopt.data.Category(impute="most_frequent").learn(np.array(["b", "a", "c", "b", ""], object))
    assert (column.fill, often.fill) == ("a", "b")


def test_missing_numbers_are_marked():
    column = graphopt.data.Number(impute="median", scale=None, add_indicator=True).learn(np.array([1.0, 2.0, 9.0]))
    assert column.encode(np.array([np.nan, 3.0])).tolist() == [[2.0, 1.0], [3.0, 0.0]]


# --- Generation ---


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, [1]), (0.51, [0, 1]), (0.74, [0, 1]), (1.0, [0, 1, 2, 3])])
def test_tokens_reach_top_p_and_no_more(top_p, kept):
    rates = np.array([0.25, 0.5, 0.125, 0.125])
    found = Sampling(temperature=1.0, top_p=top_p).probabilities(np.log2(rates) * np.log(2))
    expected = np.where(np.isin(np.arange(4), kept), rates, 0)
    np.testing.assert_allclose(found, expected / expected.sum(), rtol=1e-12)


def test_the_temperature_divides_before_top_k_and_top_p():
    logits = np.array([0.0, 1.0, 2.0, 3.0])
    found = Sampling(temperature=0.5, top_k=3, top_p=0.9).probabilities(logits)
    rates = np.exp([2.0, 4.0, 6.0]) / np.exp([2.0, 4.0, 6.0]).sum()
    assert rates[2] < 0.9 < rates[1:].sum()
    np.testing.assert_allclose(found, [0, 0, *rates[1:] / rates[1:].sum()], rtol=1e-12)
    found = Sampling(temperature=0.5, top_k=3).probabilities(logits)
    np.testing.assert_allclose(found, [0, *rates], rtol=1e-12)


def inputs_of(**shapes):
    return DecoderInputs(
        ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(shape))
        for name, shape in shapes.items()
    )


def test_a_mask_ends_with_the_tokens_that_were_read():
    wide = inputs_of(input_ids=["N", "T"], attention_mask=["N", 6], position_ids=["N", "T"])
    found = wide.feeds(np.array([[7, 8]]), 3)
    assert found["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0]]
    assert found["position_ids"].tolist() == [[3, 4]]
    open_ = inputs_of(input_ids=["N", "T"], attention_mask=["N", "S"])
    assert open_.feeds(np.array([[7]]), 2)["attention_mask"].tolist() == [[1, 1, 1]]
    fixed = inputs_of(input_ids=[1, 4], attention_mask=[1, 4])
    found = fixed.feeds(np.array([[7, 8]]), 0, filled=2)
    assert (found["input_ids"].tolist(), found["attention_mask"].tolist()) == ([[7, 8, 0, 0]], [[1, 1, 0, 0]])


def test_each_text_begins_anew():
    """The model's next token is the number of those that it has read."""
    counts = model(
        """g (int64[N,T] input_ids) => (float[N,T,97] logits) {
            one = Constant<value_ints = [1]>() size = Shape(input_ids) zeros = Sub(input_ids, input_ids)
            length = Slice(size, one, two) numbers = Add(zeros, length)
            depth = Constant<value_int = 97>() values = Constant<value_floats = [0.0, 1.0]>()
            logits = OneHot(numbers, depth, values) }""",
        two=np.array([2]),
    )
    writer = graphopt.TextGenerator(counts, "characters")
    for length in (3, 1, 5):
        assert [*writer.tokens([9] * length, max_tokens=3)] == [length, length + 1, length + 2]


# --- Callbacks ---


def told(callback, losses, **run):
    """Return the learning rate after each epoch."""
    rates = []
    executor = SimpleNamespace(learning_rate=1.0)
    given = SimpleNamespace(executor=executor, epochs=len(losses), notes=[], is_pruning=False, **run)
    callback.reset()
    for loss in losses:
        callback.on_epoch_end(given, {"loss": loss, "epoch": len(rates) + 1})
        rates.append(given.executor.learning_rate)
    return rates


@pytest.mark.parametrize("losses", [[1.0, 0.95, 0.94, 0.5, 0.45, 0.44, 0.43, 0.42], [1.0, 1.3, 1.15, 1.0, 0.95, 0.8]])
def test_the_adaptive_rate_falls_as_in_scikit_learn(losses):
    """BaseSGD counts epochs whose loss is above the best one less the tolerance."""
    found, best, waited, rate = [], np.inf, 0, 1.0
    for loss in losses:
        waited = waited + 1 if loss > best - 0.1 else 0
        best = min(best, loss)
        if waited >= 2:
            rate, waited = rate / 5, 0
        found.append(rate)
    assert told(callbacks.Adaptive(patience=2, tolerance=0.1), losses) == found
    assert found[2] == 0.2


def test_a_plateau_ends_where_the_loss_falls_by_more_than_the_least_amount():
    plateau = callbacks.ReduceOnPlateau("loss", patience=2, min_delta=0.1, factor=0.5)
    assert told(plateau, [1.0, 0.95, 0.85, 0.8, 0.78]) == [1.0, 1.0, 1.0, 1.0, 0.5]
    assert told(plateau, [1.0, 1.0, 1.0, 1.0, 1.0]) == [1.0, 1.0, 0.5, 0.5, 0.25]


# --- Batches ---


@pytest.mark.parametrize("shuffle", [True, "consecutive", False])
@pytest.mark.parametrize("start", [0, 5])
def test_an_epoch_draws_each_row_once(shuffle, start):
    batches = [*draw(range(23), 4, shuffle, np.random.default_rng(0), start)]
    whole = np.concatenate([*draw(range(23), 4, shuffle, np.random.default_rng(0))])
    assert sorted(whole) == [*range(23)]
    np.testing.assert_array_equal(np.concatenate(batches), whole[start:])
    assert shuffle is False or whole.tolist() != [*range(23)]


def test_runs_of_neighbouring_rows_are_cut_at_new_places():
    epochs = [[*draw(range(24), 4, "consecutive", np.random.default_rng(seed))] for seed in range(9)]
    assert len({int(epoch[0][0]) % 4 for epoch in epochs}) > 1


def test_epochs_of_a_loader_differ_and_have_all_rows():
    loader = Loader({"x": np.arange(10)}, 4, seed=1)
    epochs = [np.concatenate([batch["x"] for batch in loader]).tolist() for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [[*range(10)]] * 2
    assert epochs[0] != epochs[1] and len(loader) == 3


@pytest.mark.parametrize(("rows", "share"), [(10, 0.25), (10, 0.2), (7, 0.5), (100, 0.001)])
def test_rows_held_out_are_rounded_up_and_stand_on_one_side(rows, share):
    for shuffle in (True, False):
        training, held_out = hold_out(rows, share, shuffle=shuffle)
        assert len(held_out) == -(-rows * share // 1)
        assert sorted([*training, *held_out]) == [*range(rows)]


# --- Portable forms ---


def on_webgpu(text, **feeds):
    """Return the output of a model's form for WebGPU, on the CPU."""
    given = ir.from_proto(model(text))
    infer(given)
    written = given.clone()
    passes.Portable("webgpu")(written)
    assert [node.op_type for node in given.graph] != [node.op_type for node in written.graph]
    return next(iter(graphopt.run(ir.to_proto(written), feeds).values()))


def test_halves_round_to_even_on_webgpu():
    x = np.array([*np.arange(-4.5, 5), 0.49999997, -0.49999997, 0.6, -1.4, 1e9, -0.0, 2.0], np.float32)
    found = on_webgpu("g (float[N] x) => (float[N] y) { y = Round(x) }", x=x)
    np.testing.assert_array_equal(found, np.rint(x))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_windows_of_any_number_of_channels_on_webgpu(size):
    x = np.random.default_rng(size).standard_normal((2, 6, 3, 2)).astype(np.float32)
    text = f"g (float[N,6,3,2] x) => (float[N,6,3,2] y) {{ y = LRN<size = {size}, alpha = 0.7, beta = 0.6>(x) }}"
    found = on_webgpu(text, x=x)
    squares = np.zeros_like(x, float)
    for channel, other in itertools.product(range(6), range(6)):
        if channel - (size - 1) // 2 <= other <= channel + size // 2:
            squares[:, channel] += x[:, other].astype(float) ** 2
    np.testing.assert_allclose(found, x / (1 + 0.7 / size * squares) ** 0.6, rtol=1e-5)
