"""Iterables of batches: training on them, validation, what is refused, and how an interrupted run continues."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import messages
import numpy as np
import pytest
from builders import mlp
from interruptions import StopAt, alike, same

import graphopt
import passes
from graphopt.communicator import Communicator
from graphopt.data.streams import decoded, encoded
from graphopt.errors import GraphoptError
from graphopt.training.callbacks import Record, Run
from graphopt.training.checkpoints import find, read

RNG = np.random.default_rng(0)
X = RNG.standard_normal((103, 3)).astype(np.float32)
DATA = {"x": X, "target": (X.sum(axis=1) > 0).astype(np.int64)}
SIZE = 10  # the rows of a batch
STEPS = 11  # the batches of a pass


def executor(**options: Any) -> graphopt.Executor:
    step = graphopt.compile(
        mlp((3, 8, 2)), loss=passes.CrossEntropy(), optimizer=passes.AdamW(), schedule=passes.Cosine(steps=80)
    )
    return graphopt.Executor(step, threads=1, **options)


def batch(rows: Any) -> dict[str, np.ndarray]:
    return {name: array[rows] for name, array in DATA.items()}


def in_order() -> Iterator[dict[str, np.ndarray]]:
    for start in range(0, len(X), SIZE):
        yield batch(slice(start, start + SIZE))


class Again:
    """Yields batches in the order of the rows, in each pass."""

    def __init__(self, batches: Callable[[], Iterator[Any]] = in_order) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self.batches()


class Shuffled:
    """Yields batches in an order of its own, and continues from a state, whose names are those of torchdata."""

    def __init__(self) -> None:
        self.random, self.place, self.order = random.Random(5), 0, None

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        if self.order is None:
            self.order = tuple(self.random.sample(range(len(X)), len(X)))
        while self.place < len(X):
            self.place += SIZE
            yield batch(np.array(self.order[self.place - SIZE : self.place]))
        self.order, self.place = None, 0

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.getstate(), "place": self.place, 0: self.order}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.random.setstate(state["random"])
        self.place, self.order = state["place"], state[0]


class Counted:
    """Yields batches in an order that depends on the pass, and continues from the state of an iterator, as in grain."""

    def __init__(self, *, is_bytes: bool = False) -> None:
        self.is_bytes, self.passes = is_bytes, 0

    def set_epoch(self, epoch: int) -> None:
        self.passes = epoch

    def __iter__(self) -> CountedIterator:
        order = np.random.default_rng(self.passes).permutation(len(X))
        return CountedIterator(order, self.is_bytes)


class CountedIterator:
    def __init__(self, order: np.ndarray, is_bytes: bool) -> None:
        self.order, self.is_bytes, self.place = order, is_bytes, 0

    def __iter__(self) -> CountedIterator:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self.place >= len(X):
            raise StopIteration
        self.place += SIZE
        return batch(self.order[self.place - SIZE : self.place])

    def get_state(self) -> Any:
        return json.dumps(self.place).encode() if self.is_bytes else {"place": np.int64(self.place)}

    def set_state(self, state: Any) -> None:
        self.place = json.loads(state) if self.is_bytes else int(state["place"])


def fit(runner: graphopt.Executor, data: Any, **options: Any) -> list[Record]:
    return graphopt.fit(runner, data, **{"epochs": 3, "validation": DATA, **options})


def interrupt(data: Any, folder: Path, step: int | None) -> None:
    """Train until a step, or until the end of the first epoch."""
    if step is None:
        fit(executor(), data, checkpoint=folder, epochs=1)
    else:
        fit(executor(), data, checkpoint=folder, callbacks=[StopAt(step)])


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.slow
def test_the_bits_are_those_of_arrays(prefetch: int, steps_per_call: int) -> None:
    arrays, stream = executor(), executor(steps_per_call=steps_per_call)
    expected = fit(arrays, DATA, batch_size=SIZE, shuffle=False)
    found = fit(stream, Again(), prefetch=prefetch)
    assert same(arrays, stream)
    assert [one["validation_loss"] for one in found] == pytest.approx([x["validation_loss"] for x in expected])
    assert [one["loss"] for one in found] == [one["loss"] for one in expected]


@pytest.mark.slow
def test_a_list_of_batches_tells_its_length() -> None:
    seen: list[Run] = []

    class See(graphopt.Callback):
        def on_fit_begin(self, run: Run) -> None:
            seen.append(run)

    fit(executor(), list(in_order()), callbacks=[See()], validation=Again())
    fit(executor(), Again(), callbacks=[See()], validation=None)
    assert [(run.steps, run.rows, run.validation_rows) for run in seen] == [(11, None, None), (None, None, 0)]


def test_several_workers_need_data_with_rows() -> None:
    class Two(Communicator):
        size = 2

    several = executor()
    several.workers = Two()
    with pytest.raises(GraphoptError, match="data: expected rows, which 2 workers share, found an iterable, Again"):
        fit(several, Again())


def test_an_endless_iterable() -> None:
    def endless() -> Iterator[dict[str, np.ndarray]]:
        for start in itertools.count():
            yield batch(np.arange(start * SIZE, (start + 1) * SIZE) % len(X))

    runner, twin = executor(), executor()
    records = fit(runner, endless(), steps_per_epoch=7)
    assert [one["step"] for one in records] == [7, 14, 21]
    for one in itertools.islice(endless(), 21):
        twin.step(one)
    assert same(runner, twin)


def test_epochs_of_a_number_of_steps_follow_one_another_through_the_passes() -> None:
    runner, twin = executor(), executor()
    assert [one["step"] for one in fit(runner, Again(), steps_per_epoch=8)] == [8, 16, 24]
    for one in itertools.islice(itertools.cycle(in_order()), 24):
        twin.step(one)
    assert same(runner, twin)


def test_validation_and_evaluation_by_iterables() -> None:
    one, other = executor(), executor()
    expected = fit(one, DATA, batch_size=SIZE)
    found = fit(other, DATA, batch_size=SIZE, validation=Again())
    assert [x["accuracy"] for x in found] == [x["accuracy"] for x in expected]
    expected = graphopt.evaluate(one, DATA, metrics=["roc_auc"])
    assert graphopt.evaluate(one, Again(), metrics=["roc_auc"]) == pytest.approx(expected)


@pytest.mark.parametrize("reads_state", [True, False])
@pytest.mark.parametrize("steps", [None, 7])
@pytest.mark.parametrize("data", [Shuffled, Counted, lambda: Counted(is_bytes=True)])
@pytest.mark.parametrize("step", [1, 5, 10, 11, 12, 14, 20])
@pytest.mark.sample(12)
@pytest.mark.slow
def test_a_stopped_run_continues_bit_for_bit(
    tmp_path: Path, step: int, data: Any, steps: int | None, reads_state: bool
) -> None:
    twin = executor(steps_per_call=4)
    options = {"steps_per_epoch": steps}
    expected = fit(twin, data(), **options)
    stop = StopAt(step, reads_state=reads_state)
    options |= {"checkpoint": tmp_path}
    fit(executor(steps_per_call=4), data(), **options, callbacks=[stop], prefetch=2)
    runner, seen = executor(), StopAt()
    records = fit(runner, data(), **options, resume=True, callbacks=[seen])
    assert same(runner, twin)
    assert alike(records) == alike(expected)
    assert seen.steps == list(range(stop.steps[-1] + 1, expected[-1]["step"] + 1))
    assert fit(executor(), data(), **options, resume=True) == records  # nothing is left to do


@pytest.mark.parametrize("steps", [None, 7])
@pytest.mark.parametrize("data", [Shuffled, Counted])
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.slow
def test_a_run_continues_between_two_epochs(tmp_path: Path, epochs: int, data: Any, steps: int | None) -> None:
    twin, runner = executor(), executor()
    expected = fit(twin, data(), steps_per_epoch=steps)
    options = {"steps_per_epoch": steps, "checkpoint": tmp_path}
    fit(executor(), data(), **options, epochs=epochs)
    assert alike(fit(runner, data(), **options, resume=True)) == alike(expected)
    assert same(runner, twin)


def test_an_iterable_that_raises_an_error_continues_after_it(tmp_path: Path) -> None:
    class Failing(Shuffled):
        def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
            for i, item in enumerate(super().__iter__()):
                if i == 4:
                    raise ConnectionError("the network is gone")
                yield item

    twin, runner = executor(), executor()
    expected = fit(twin, Shuffled())
    with pytest.raises(ConnectionError, match="the network is gone"):
        fit(executor(), Failing(), checkpoint=graphopt.Checkpoints(tmp_path, every="3 steps"))
    assert alike(fit(runner, Shuffled(), checkpoint=tmp_path, resume=True)) == alike(expected)
    assert same(runner, twin)


def test_data_without_a_state_start_over_and_say_so(tmp_path: Path) -> None:
    fit(executor(), Again(), checkpoint=tmp_path, callbacks=[StopAt(14)])
    seen = StopAt()
    with pytest.warns(UserWarning, match="data: Again has no state_dict and load_state_dict: it starts over"):
        records = fit(executor(), Again(), checkpoint=tmp_path, resume=True, callbacks=[seen])
    assert [one["step"] for one in records] == [
        11,
        25,
        36,
    ]  # three steps of the second epoch, and a whole pass


def test_data_without_a_state_lose_nothing_between_two_epochs(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    twin, runner = executor(), executor()
    expected = fit(twin, Again())
    fit(executor(), Again(), checkpoint=tmp_path, epochs=2)
    assert alike(fit(runner, Again(), checkpoint=tmp_path, resume=True)) == alike(expected)
    assert same(runner, twin)
    assert not recwarn.list


@pytest.mark.slow
def test_a_checkpoint_has_no_pickle_of_the_data(tmp_path: Path) -> None:
    fit(executor(), Shuffled(), checkpoint=tmp_path, callbacks=[StopAt(5)])
    position = read(find(tmp_path)).progress["data"]
    assert (position["batches"], position["passes"], position["of"]) == (5, 0, "iterable")
    assert dict(map(tuple, position["state"]["dict"]))["place"] == 50


def test_a_state_of_other_types_is_refused(tmp_path: Path) -> None:
    class Odd(Shuffled):
        def state_dict(self) -> dict[str, Any]:
            return {"where": [1, {2}]}

    with pytest.raises(GraphoptError, match=r"data: state\['where'\]\[1\]: expected numbers, .* found set"):
        fit(executor(), Odd(), checkpoint=tmp_path)
    fit(executor(), Odd())  # without a checkpoint, there is no state


def test_checkpoints_of_other_data(tmp_path: Path) -> None:
    fit(executor(), DATA, checkpoint=tmp_path, epochs=1)
    with pytest.raises(GraphoptError, match="expected rows None as in this run, found rows 103"):
        fit(executor(), Again(), checkpoint=tmp_path, resume=True)


def test_states_survive_json() -> None:
    state = {
        "a": (1, [2.5, None, True], b"\x00\xff"),
        3: np.arange(6, dtype=np.int16).reshape(2, 3),
        (1, "b"): {"dict": [1], "bytes": "text"},
        "random": random.Random(0).getstate(),
        "none": np.zeros((0, 2)),
    }
    found = decoded(json.loads(json.dumps(encoded(state))))
    arrays = [found.pop(name) for name in (3, "none")], [state.pop(name) for name in (3, "none")]
    assert found == state
    for one, other in zip(*arrays, strict=True):
        assert (one.dtype, one.shape, one.tolist()) == (other.dtype, other.shape, other.tolist())


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("streams_mistakes"))
def test_batches_and_iterables_that_do_not_fit(call: str) -> None:
    messages.refused("streams_mistakes", call, globals())


def test_a_batch_of_the_model_s_size() -> None:
    model = mlp((3, 8, 2))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 10
    step = graphopt.compile(model, loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    whole = [batch(slice(start, start + 10)) for start in range(0, 100, 10)]
    records = fit(graphopt.Executor(step), whole, validation=whole[:2])
    assert records[-1]["step"] == 30
    with pytest.raises(GraphoptError, match=r"batch 11: data: expected 10 rows, .* found 3: drop an incomplete"):
        fit(graphopt.Executor(step), Again(), validation=None)


def test_an_iterable_may_use_its_arrays_again() -> None:
    def overwritten() -> Iterator[dict[str, np.ndarray]]:
        kept = {name: array.copy() for name, array in batch(slice(10)).items()}
        for one in itertools.islice(in_order(), 10):
            for name, array in one.items():
                kept[name][...] = array
            yield kept

    runner, twin = executor(steps_per_call=4), executor()
    fit(runner, Again(overwritten), epochs=1, prefetch=2)
    fit(twin, Again(lambda: itertools.islice(in_order(), 10)), epochs=1)
    assert same(runner, twin)


def test_the_learning_rate_finder_leaves_all_batches_to_the_training() -> None:
    def runner() -> graphopt.Executor:
        step = graphopt.compile(mlp((3, 8, 2)), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
        return graphopt.Executor(step, threads=1)

    for data in (Again, lambda: itertools.cycle(in_order())):
        one, other = runner(), runner()
        finder = graphopt.callbacks.LearningRateFinder(steps=25)
        fit(one, data(), steps_per_epoch=11, callbacks=[finder])
        assert len(finder.rates) == 25
        other.learning_rate = one.learning_rate
        fit(other, Again())
        assert same(one, other)


def torchdata(workers: int) -> Any:
    torch = pytest.importorskip("torch")
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    rows = [{name: torch.from_numpy(np.asarray(x[i])) for name, x in DATA.items()} for i in range(len(X))]
    order = loaders.sampler.RandomSampler(rows, generator=torch.Generator().manual_seed(3))
    return loaders.StatefulDataLoader(rows, SIZE, sampler=order, num_workers=workers)


def grain() -> Any:
    rows = [{name: x[i] for name, x in DATA.items()} for i in range(len(X))]
    source = pytest.importorskip("grain").MapDataset.source(rows)
    return source.shuffle(seed=1).to_iter_dataset().batch(SIZE)


def hugging_face(is_shuffled: bool) -> Any:
    rows = {name: x.tolist() for name, x in DATA.items()}
    rows = pytest.importorskip("datasets").Dataset.from_dict(rows).to_iterable_dataset(num_shards=4)
    # shuffled: the shards; a larger buffer is not in its state
    return (rows.shuffle(seed=3, buffer_size=1) if is_shuffled else rows).batch(SIZE)


LOADERS: dict[str, Callable[[], Any]] = {
    "torchdata": lambda: torchdata(0),
    "torchdata, two workers": lambda: torchdata(2),
    "grain": grain,
    "Hugging Face": lambda: hugging_face(False),
    "Hugging Face, shuffled": lambda: hugging_face(True),
}


@functools.cache
def whole(loader: str) -> tuple[graphopt.Executor, Any]:
    """Return what has trained on a loader without a stop, and its records."""
    twin = executor()
    return twin, alike(fit(twin, LOADERS[loader]()))


@pytest.mark.parametrize("step", [3, 10, 11, 15, 22, None])
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.sample(10)
@pytest.mark.slow
def test_a_stopped_run_on_a_loader_of_others_continues(tmp_path: Path, loader: str, step: int | None) -> None:
    twin, expected = whole(loader)
    runner = executor()
    interrupt(LOADERS[loader](), tmp_path, step)
    assert alike(fit(runner, LOADERS[loader](), checkpoint=tmp_path, resume=True)) == expected
    assert same(runner, twin)


def test_a_stream_of_rows_is_refused() -> None:
    rows = {name: x.tolist() for name, x in DATA.items()}
    stream = pytest.importorskip("datasets").Dataset.from_dict(rows).to_iterable_dataset()
    with pytest.raises(GraphoptError, match=r"found one .*: yield batches, such as those of .batch"):
        fit(executor(), stream)


def test_pytorch_s_loader() -> None:
    torch = pytest.importorskip("torch")
    rows = torch.utils.data.StackDataset(**{name: torch.from_numpy(array) for name, array in DATA.items()})
    one, other = executor(), executor()
    records = fit(one, torch.utils.data.DataLoader(rows, SIZE))
    fit(other, Again())
    assert same(one, other)
    assert records[-1]["step"] == 3 * STEPS
    pairs = torch.utils.data.TensorDataset(*map(torch.from_numpy, DATA.values()))
    two = executor()
    fit(two, torch.utils.data.DataLoader(pairs, SIZE))
    assert same(one, two)
    trained = [{"x": torch.zeros(2, 3, requires_grad=True), "target": torch.zeros(2, dtype=torch.int64)}]
    with pytest.raises(GraphoptError, match=r"data 'x': expected an array, found a Tensor: .*requires grad"):
        fit(executor(), trained)
