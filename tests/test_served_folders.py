"""Folders of models: which file is the model, and what an exported folder has."""

from __future__ import annotations

import json
from pathlib import Path

import builders
import numpy as np
import onnxruntime
import pytest
import safetensors.numpy
from builders import mlp

import graphopt
import passes
from graphopt import cli
from graphopt.data.language.tokenizer import tokenizer_beside

TOKENIZER = {"tokenizer.json": "{}", "tokenizer_config.json": "{}", "vocab.txt": "a"}
STEPS = {"adapter": passes.LoRA("fc0.*", rank=2), "loss": passes.CrossEntropy(), "optimizer": passes.SGD(0.1)}


def folder_of(place: Path, *models: str, **files: object) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    for name in models:
        (place / name).parent.mkdir(exist_ok=True)
        graphopt.save(mlp(), place / name)
    for name, content in files.items():
        (place / name.replace("__", ".")).write_text(content if isinstance(content, str) else json.dumps(content))
    return place


def genai(filename: object, **more: object) -> dict[str, object]:
    return {"model": {"type": "llama", "decoder": {"filename": filename, **more}}}


@pytest.mark.parametrize(
    ("models", "config", "expected"),
    [
        (["a.onnx", "model.onnx"], None, "model.onnx"),
        (["a.onnx", "b.onnx"], genai("b.onnx"), "b.onnx"),
        (["onnx/model.onnx", "onnx/model_q4.onnx"], None, "onnx/model.onnx"),
    ],
)
def test_a_folder_is_read_as_its_model(models, config, expected, tmp_path):
    place = folder_of(tmp_path / "f", *models, **({} if config is None else {"genai_config__json": config}))
    only = mlp(seed=3)
    graphopt.save(only, place / expected)
    x = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(graphopt.run(place, {"x": x})["y"], graphopt.run(only, {"x": x})["y"])


@pytest.mark.parametrize(
    ("models", "config", "message"),
    [
        (["a.onnx"], genai("../a.onnx"), "model.decoder.filename: expected the name of a file beside it"),
        (["a.onnx"], genai("/etc/passwd"), "model.decoder.filename: expected the name of a file beside it"),
        (["a.onnx"], genai(3), "model.decoder.filename: expected the name of a file beside it, found 3"),
        (
            ["a.onnx"],
            {"model": []},
            "model.decoder.filename: expected the name of a file beside it, found None",
        ),
        (["a.onnx"], [1], "expected an object in JSON, found a list"),
        (["a.onnx"], genai("c.onnx"), "c.onnx: no such file"),
    ],
)
def test_a_folder_without_one_model_is_refused(models, config, message, tmp_path):
    place = folder_of(tmp_path / "f", *models, **({} if config is None else {"genai_config__json": config}))
    with pytest.raises(graphopt.GraphoptError) as error:
        graphopt.load(place)
    assert message in str(error.value)


def trained(base: Path) -> graphopt.Executor:
    executor = graphopt.Executor(graphopt.compile(base, **STEPS), native=False)
    executor.step(x=np.ones((2, 4), np.float32), target=np.zeros(2, np.int64))
    return executor


@pytest.mark.parametrize("inner", ["", "onnx/"])
@pytest.mark.parametrize("form", ["merged", "slots"])
def test_a_saved_folder_has_what_lies_beside_the_base(form, inner, tmp_path):
    if form == "slots" and not hasattr(onnxruntime, "AdapterFormat"):
        pytest.skip("onnxruntime 1.19 has no adapters")
    place = folder_of(tmp_path / "f", f"{inner}model.onnx", config__json={"model_type": "llama"})
    folder_of(place, **{name.replace(".", "__"): text for name, text in TOKENIZER.items()}, notes__md="mine")
    executor = trained(place / inner / "model.onnx")
    graphopt.save_folder(executor, tmp_path / "out", base=place, form=form)
    files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    adapter = {"adapter.onnx_adapter"} if form == "slots" else set()
    assert files == {f"{inner}model.onnx", "config.json", *TOKENIZER, *adapter}
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / inner / "model.onnx"))
    options = onnxruntime.RunOptions()
    if adapter:
        own = onnxruntime.LoraAdapter()
        own.Load(str(tmp_path / "out" / "adapter.onnx_adapter"))
        options.add_active_adapter(own)
    np.testing.assert_allclose(session.run(None, {"x": x}, options)[0], executor.predict(x=x)["y"], atol=1e-6)


def test_other_graphs_of_a_folder_go_with_it(tmp_path):
    config = genai("model.onnx") | {"vision": {"filename": "vision.onnx"}}
    place = folder_of(tmp_path / "f", "model.onnx", "vision.onnx", "unused.onnx", genai_config__json=config)
    graphopt.save_folder(trained(place), tmp_path / "out", base=place)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("genai_config.json", "model.onnx", "vision.onnx")
    ]


def of_peft(folder: Path) -> tuple[dict[str, object], set[str]]:
    config = json.loads((folder / "adapter_config.json").read_text())
    return config, set(safetensors.numpy.load_file(folder / "adapter_model.safetensors"))


@pytest.mark.parametrize(
    ("files", "base", "task"),
    [
        ({"config__json": {"_name_or_path": "me/it", "architectures": ["LlamaForCausalLM"]}}, "me/it", "CAUSAL_LM"),
        ({"config__json": {"architectures": ["BertForSequenceClassification"]}}, None, "SEQ_CLS"),
        ({"config__json": {"architectures": ["LlamaModel", 3], "_name_or_path": 3}}, None, None),
        ({"config__json": "no config of a model", "genai_config__json": genai("model.onnx")}, None, "CAUSAL_LM"),
        ({"genai_config__json": {"model": {**genai("model.onnx")["model"], "vision": {}}}}, None, None),
        ({"config__json": ["architectures"]}, None, None),
    ],
)  # fmt: skip
def test_the_base_and_its_task_are_those_of_the_configs(files, base, task, tmp_path):
    place = folder_of(tmp_path / "f", "model.onnx", **files)
    executor = trained(place)
    graphopt.save_folder(executor, tmp_path / "a", base=place, form="peft", names={"*": "*"})
    config, _ = of_peft(tmp_path / "a")
    assert (config["base_model_name_or_path"], config["task_type"]) == (base, task)
    graphopt.save_folder(executor, tmp_path / "b", base=place, form="peft", names={"*": "*"}, base_name="my/own")
    assert of_peft(tmp_path / "b")[0]["base_model_name_or_path"] == "my/own"


def test_a_causal_loss_tells_the_task(tmp_path):
    graphopt.save(graphopt.models.transformer((8,), 50, width=8, layers=1), tmp_path / "m.onnx")
    steps = {"loss": passes.CausalLanguageModel(), "optimizer": passes.SGD(0.1)}
    step = graphopt.compile(tmp_path / "m.onnx", adapter=passes.LoRA(rank=2), **steps)
    graphopt.save_adapter(graphopt.Executor(step, native=False), tmp_path / "a", form="peft")
    assert of_peft(tmp_path / "a")[0]["task_type"] == "CAUSAL_LM"


def test_a_folder_that_was_loaded_keeps_its_names_and_its_base(tmp_path):
    place = folder_of(tmp_path / "f", "model.onnx", config__json={"_name_or_path": "another"})
    first = trained(place)
    options = {"form": "peft", "names": {"fc*": "net.inner.fc*"}, "base_name": "me/it"}
    graphopt.save_adapter(first, tmp_path / "a", **options)
    text = (tmp_path / "a" / "adapter_config.json").read_text()
    (tmp_path / "a" / "adapter_config.json").write_text(
        text.replace('"task_type": null', '"task_type": "FEATURE_EXTRACTION"')
    )
    step = graphopt.compile(place, **{**STEPS, "adapter": passes.LoRA.load(tmp_path / "a")})
    graphopt.save(step, tmp_path / "step.onnx")
    executor = graphopt.Executor(tmp_path / "step.onnx", native=False)
    executor.step(x=np.ones((2, 4), np.float32), target=np.zeros(2, np.int64))
    graphopt.save_adapter(executor, tmp_path / "b", form="peft")
    (config, names), (expected, known) = of_peft(tmp_path / "b"), of_peft(tmp_path / "a")
    assert names == known and all(".net.inner.fc0." in name for name in names)
    same = ("target_modules", "base_model_name_or_path", "task_type")
    assert [config[x] for x in same] == [expected[x] for x in same]
    graphopt.save_adapter(executor, tmp_path / "c", form="peft", names={"*": "own.*"})
    assert all(".own.fc0." in name for name in of_peft(tmp_path / "c")[1])


def test_what_cannot_be_saved_is_refused_and_writes_nothing(tmp_path):
    place = folder_of(tmp_path / "f", "model.onnx")
    executor = trained(place)
    plain = graphopt.Executor(graphopt.compile(place, **{**STEPS, "adapter": None}), native=False)
    full = folder_of(tmp_path / "full", "a.onnx")
    typed = folder_of(tmp_path / "typed", "model.onnx", config__json={"model_type": "llama", "num_hidden_layers": 0})
    other = folder_of(tmp_path / "other", "model.onnx")
    graphopt.save(builders.linear(), other / "model.onnx")
    out = tmp_path / "out"
    cases = {
        "expected an executor first": lambda: graphopt.save_folder(place, out, base=place),
        "unknown form 'hf'": lambda: graphopt.save_folder(executor, out, base=place, form="hf"),
        "expected the file of a model or its folder, found no nowhere": lambda: graphopt.save_folder(
            executor, out, base="nowhere"
        ),
        "expected no folder, or an empty one, found files": lambda: graphopt.save_folder(executor, full, base=place),
        "expected a training graph with adapters, found none": lambda: graphopt.save_folder(
            plain, out, base=place, form="slots"
        ),
        "expected config.json of transformers or genai_config.json": lambda: graphopt.save_folder(
            executor, out, base=place, form="gguf"
        ),
        "base_name: expected form='peft', found form='slots'": lambda: graphopt.save_folder(
            executor, out, base=place, form="slots", base_name="me/it"
        ),
        "base_name: expected none for an adapter file": lambda: graphopt.save_adapter(executor, out, base_name="me/it"),
        "num_hidden_layers: expected a number from 1 to 1,000, found 0": lambda: graphopt.save_folder(
            executor, out, base=typed, form="gguf"
        ),
        "expected the file that was compiled, with weight 'fc0.weight', found none": lambda: graphopt.save_folder(
            executor, out, base=other
        ),
    }
    for message, call in cases.items():
        with pytest.raises(graphopt.GraphoptError) as error:
            call()
        assert message in str(error.value)
        assert "\n" not in str(error.value)
    assert not out.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "full", "other", "typed"]


def test_the_command_says_what_it_needs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", "folder=nothing"]) == 1
    assert "expected the folder of a run with trained.onnx, found nothing without" in capsys.readouterr().err
    assert cli.main(["export", "runs/mine"]) == 1
    assert "runs/mine: expected the folder of a run" in capsys.readouterr().err


@pytest.mark.parametrize("inner", ["onnx", ""])
def test_a_tokenizer_beside_the_model_comes_before_one_above(inner, tmp_path):
    (tmp_path / "onnx").mkdir()
    (tmp_path / "config.json").write_text("{}")
    for folder in {tmp_path, tmp_path / inner}:
        (folder / "tokenizer.json").write_text("{}")
    assert tokenizer_beside(tmp_path / "onnx" / "model.onnx") == tmp_path / inner / "tokenizer.json"


@pytest.mark.parametrize(
    ("said", "loss"), [([], "CausalLanguageModel("), (["loss=cross_entropy", "loss.axis=2"], "CrossEntropy(")]
)
def test_the_report_of_a_decoder_has_the_loss_of_decoders(said, loss, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    place = folder_of(tmp_path / "f", config__json={"architectures": ["LlamaForCausalLM"]})
    graphopt.save(graphopt.models.transformer((8,), 50, width=8, layers=1), place / "model.onnx")
    assert cli.main(["report", "f", *said, "folder=out"]) == 0
    text = (tmp_path / "out" / "report.txt").read_text()
    assert "blocked    by nothing" in text and f" {loss}" in text
    assert ("causal_language_model, as the model's config says" in capsys.readouterr().out) != bool(said)
