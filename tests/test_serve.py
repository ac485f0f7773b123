"""`graphopt serve`: a page trains any model file as Python does, and its server answers no one else."""

from __future__ import annotations

import contextlib
import csv
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import builders
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import safetensors.numpy
from PIL import Image
from test_hosts_javascript import CHROMIUM, TESTS, javascript

import graphopt
import passes
from graphopt import cli, models
from graphopt.errors import GraphoptError
from graphopt.graph.classified import labels_in
from graphopt.hosts.for_page import Choice, compile_for_page
from graphopt.hosts.server import MOST_BYTES, PageServer

RUNTIME = TESTS / "node_modules" / "onnxruntime-web" / "dist"
MODEL = ir.to_proto(models.mlp((4,), 3, hidden=[8])).SerializeToString()
LABELS = ["ant", "bee", "cow"]
ROOT = Path(graphopt.__file__).parents[1]

needs_runtime = pytest.mark.skipif(
    not RUNTIME.exists(), reason="needs `npm install --prefix examples/hosts/javascript/test`"
)


@pytest.mark.slow
def test_the_compiler_needs_no_runtime_and_starts_no_process(tmp_path: Path) -> None:
    """So it can run where Python is compiled to WebAssembly; the graphs are those that a server writes."""
    (tmp_path / "model.onnx").write_bytes(MODEL)
    program = """
import sys
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("onnxruntime", "hydra", "torch", "rich"):
            raise ImportError(f"{name} is refused")
sys.meta_path.insert(0, Refusing())
from pathlib import Path
from graphopt.hosts.for_page import Choice, compile_for_page
def refuse(event, arguments):
    if event.startswith(("subprocess", "os.exec", "os.fork", "os.spawn", "os.system", "os.posix_spawn")):
        raise RuntimeError(event)
sys.addaudithook(refuse)
files = compile_for_page(Path("model.onnx").read_bytes(), Choice(trains=sys.argv[1], outputs=5, rank=2))
for name, file in files.items():
    Path(name).write_bytes(file)
"""
    for trains in ("head", "lora", "all"):
        folder = tmp_path / trains
        folder.mkdir()
        shutil.copy(tmp_path / "model.onnx", folder)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", program, trains], cwd=folder, env=environment, check=True)
        written = compile_for_page(MODEL, Choice(trains=trains, outputs=5, rank=2))  # type: ignore[arg-type]
        assert (folder / "state.safetensors").read_bytes() == written["state.safetensors"]
        graphs = [onnx.load_from_string(x).graph for x in ((folder / "train.onnx").read_bytes(), written["train.onnx"])]
        here, there = ([(node.op_type, len(node.input), len(node.output)) for node in x.node] for x in graphs)
        assert here == there
        assert "proof.safetensors" in written and not (folder / "proof.safetensors").exists()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([], "choice: expected fields by name, found a list"),
        ({"train": "all"}, "choice: unknown field 'train', nearest: 'trains'"),
        ({"trains": "everything"}, "Choice(trains='everything'): expected 'head', 'lora' or 'all'"),
        ({"outputs": 1.5}, "Choice(outputs=1.5): expected a whole number"),
        ({"outputs": 10**9}, "expected a whole number in [1, 10000]"),
        ({"learning_rate": float("nan")}, "Choice(learning_rate=nan): expected"),
        ({"device": "../wasm"}, "expected 'wasm' or 'webgpu'"),
    ],
)
def test_a_wrong_choice_is_told(said: object, message: str) -> None:
    with pytest.raises(GraphoptError) as error:
        Choice.of(said)
    assert message in str(error.value), error.value


def test_a_model_that_does_not_fit_is_told(tmp_path: Path) -> None:
    outside = onnx.load_from_string(MODEL)
    (tmp_path / "secret").write_bytes(bytes(128))  # as many as the weight has
    onnx.external_data_helper.set_external_data(outside.graph.initializer[0], str(tmp_path / "secret"), 0, 128)
    outside.graph.initializer[0].ClearField("raw_data")
    for model, message in (
        (b"PK", "expected an ONNX model"),
        (outside.SerializeToString(), "expected its numbers in the model's file, found them in '.*secret'"),
        (classifier("Sigmoid"), "found a Sigmoid"),
        (classifier("Sigmoid", "Identity", "Clip"), "found a Sigmoid"),
        (growing(10**8), "expected constants of at most .* bytes in the model, found"),
    ):
        with pytest.raises(GraphoptError, match=message):
            compile_for_page(model, Choice(outputs=3))


def test_a_large_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphopt.hosts.for_page.MOST_BYTES", 1000)
    with pytest.raises(GraphoptError, match="expected at most 1,000 bytes of graphs and state, found"):
        compile_for_page(MODEL, Choice(outputs=3))


def classifier(*operators: str, first: str = "", width: int | str = 4) -> bytes:
    """Return a linear classifier of 3 classes with operators behind it, and its classes as the first output."""
    helper, shape = onnx.helper, ("batch", 3)
    nodes = [helper.make_node("Gemm", ["x", "w"], ["y0"])]
    nodes += [helper.make_node(name, [f"y{i}"], [f"y{i + 1}"]) for i, name in enumerate(operators)]
    outputs = [helper.make_tensor_value_info(f"y{len(operators)}", onnx.TensorProto.FLOAT, shape)]
    if first:
        nodes.append(helper.make_node("ArgMax", ["y0"], [first], axis=1, keepdims=0))
        outputs.insert(0, helper.make_tensor_value_info(first, onnx.TensorProto.INT64, shape[:1]))
    weight = onnx.numpy_helper.from_array(np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32), "w")
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ("batch", width))
    return onnx_file(nodes, x, outputs, [weight])


def growing(numbers: int) -> bytes:
    """Return a small file that asks for a constant of so many numbers."""
    helper = onnx.helper
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ("batch", 1)) for name in "xy")
    weights = [
        onnx.numpy_helper.from_array(a, name) for name, a in (("w", np.ones((1, 1), "f")), ("n", np.array([numbers])))
    ]
    nodes = [
        helper.make_node("ConstantOfShape", ["n"], ["c"]),
        helper.make_node("ReduceSum", ["c"], ["sum"]),
        helper.make_node("Gemm", ["x", "w", "sum"], ["y"]),
    ]
    return onnx_file(nodes, x, [y], weights)


def onnx_file(nodes: Any, x: Any, outputs: Any, weights: Any) -> bytes:
    graph = onnx.helper.make_graph(nodes, "graph", [x], outputs, weights)
    opsets = [onnx.helper.make_opsetid("", 17)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()  # type: ignore[no-any-return]


@pytest.mark.parametrize("behind", [("Softmax",), ("Softmax", "Identity"), ("Softmax", "Clip", "Flatten")])
@pytest.mark.filterwarnings("error")
def test_probabilities_are_not_taken_for_logits(behind: tuple[str, ...]) -> None:
    """The loss is that of the softmax of the products, as PyTorch computes it."""
    torch = pytest.importorskip("torch")
    files = compile_for_page(classifier(*behind), Choice(outputs=3))
    state = safetensors.numpy.load(files["state.safetensors"])
    x, target = np.eye(4, dtype=np.float32) * 3, np.array([0, 1, 2, 0])
    session = onnxruntime.InferenceSession(files["evaluate.onnx"], providers=["CPUExecutionProvider"])
    feeds = {"x": x, "target": target, **state}
    found = session.run(["loss"], {each.name: feeds[each.name] for each in session.get_inputs()})[0]
    logits = torch.from_numpy(x @ state["w"])
    expected = torch.nn.functional.cross_entropy(logits, torch.from_numpy(target))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5)


def test_probabilities_beside_their_rests_are_those_of_two_classes() -> None:
    """scikit-learn's converter writes so what a network computes of two classes from one logit."""
    sklearn, skl2onnx = pytest.importorskip("sklearn.neural_network"), pytest.importorskip("skl2onnx")
    random = np.random.default_rng(0)
    x, target = random.standard_normal((40, 4)).astype(np.float32), random.integers(0, 2, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not converged
        fitted = sklearn.MLPClassifier((8,), max_iter=5, random_state=0).fit(x, target)
    model = skl2onnx.to_onnx(fitted, x[:1], options={"zipmap": False}, target_opset=17).SerializeToString()
    files = compile_for_page(model, Choice(outputs=2))
    session = onnxruntime.InferenceSession(files["evaluate.onnx"], providers=["CPUExecutionProvider"])
    (name,) = (
        each.name
        for each in session.get_inputs()
        if each.type == "tensor(float)" and len(each.shape) == 2 and each.shape[1:] == [4]
    )
    feeds = {name: x, "target": target, **safetensors.numpy.load(files["state.safetensors"])}
    found = session.run(["loss"], {each.name: feeds[each.name] for each in session.get_inputs()})[0]
    assert abs(found - -np.log(fitted.predict_proba(x)[np.arange(40), target]).mean()) < 1e-6


@pytest.mark.parametrize("parts", ["p, rest, q", "p, rest, q, other", "both, others"])
def test_labels_that_need_not_exclude_each_other_are_no_classes(parts: str) -> None:
    body = f"""g (float[N,4] x) => (float[N,C] y) {{
        a = MatMul(x, w)\n p = Sigmoid(a)\n rest = Sub(one, p)\n b = MatMul(x, v)\n q = Sigmoid(b)\n
        other = Sub(one, q)\n both = Concat<axis=1>(p, q)\n others = Sub(one, both)\n y = Concat<axis=1>({parts}) }}"""
    weights = {"w": np.ones((4, 1)), "v": -np.ones((4, 1)), "one": np.array(1.0)}
    file = builders.model(body, **weights)
    with pytest.raises(GraphoptError, match="found a Sigmoid, of labels that need not exclude each other"):
        compile_for_page(file.SerializeToString(), Choice(outputs=4))


@pytest.fixture(name="server")
def _server() -> Iterator[PageServer]:
    with PageServer(RUNTIME) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def answer(
    server: PageServer, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
) -> tuple[int, bytes]:
    """Return the status and the content of an answer to exactly these headers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, values in headers.items():
        for value in values.split("\n"):
            connection.putheader(name, value)
    connection.endheaders(body)
    with connection.getresponse() as response:
        content = response.read()
    connection.close()
    return response.status, content


@needs_runtime
def test_the_server_answers_its_page_alone(server: PageServer) -> None:
    host = f"127.0.0.1:{server.server_port}"
    page = {"Host": host}
    assert answer(server, "GET", "/", page)[0] == answer(server, "GET", "/page.js?x", page)[0] == 200
    assert (
        answer(server, "GET", "/onnxruntime/ort.webgpu.min.mjs", {"Host": host.replace("127.0.0.1", "localhost")})[0]
        == 200
    )
    for path in (
        "/../../pyproject.toml",
        "//etc/passwd",
        "/package.json",
        "/README.md",
        "/%70age.js",
        "/compile",
        "/onnxruntime/",
    ):
        assert answer(server, "GET", path, page)[0] == 404, path
    for other in (
        "evil.example",
        f"evil.example:{server.server_port}",
        "127.0.0.1",
        f"{host}\n{host}",
        f"0.0.0.0:{server.server_port}",
    ):
        assert answer(server, "GET", "/", {"Host": other})[0] == 421, other
    assert answer(server, "GET", "/", {})[0] == 421

    ours = {
        **page,
        "Origin": f"http://{host}",
        "Authorization": f"Bearer {server.token}",
        "Content-Length": str(len(MODEL)),
        "graphopt-choice": json.dumps({"trains": "all", "outputs": 3}),
    }

    def post(path: str = "/compile", **changed: str | None) -> tuple[int, str]:
        headers = {name: text for name, text in {**ours, **changed}.items() if text is not None}
        status, content = answer(server, "POST", path, headers, MODEL)
        return status, "" if status == 200 else content.decode()

    assert post()[0] == 200
    for changed in (
        {"Origin": None},
        {"Origin": "null"},
        {"Origin": "http://evil.example"},
        {"Origin": f"https://{host}"},
        {"Authorization": None},
        {"Authorization": "Bearer "},
        {"Authorization": server.token},
        {"Authorization": "Bearer é"},
    ):
        assert post(**changed)[0] == 403, changed
    assert post(Host="evil.example")[0] == 421
    assert post("/other")[0] == 404
    for length in (None, "0", "-1", "+5", "1e3", str(MOST_BYTES + 1), "9" * 30, "²"):
        assert post(**{"Content-Length": length})[0] in (400, 413), length
    assert post(**{"graphopt-choice": "x" * 5000})[0] == 413
    for choice, message in (
        ("{", "choice: "),
        ('{"trains": "x"}', "expected 'head'"),
        ('{"trains": "lora", "outputs": 3, "rank": 9}', "rank"),
    ):
        status, text = post(**{"graphopt-choice": choice})
        assert status == 422 and message in text and "\n" not in text, text
    assert answer(server, "OPTIONS", "/compile", {"Host": host, "Origin": "http://evil.example"})[0] == 501
    assert post()[0] == 200  # it goes on


@needs_runtime
def test_silent_strangers_do_not_keep_the_page_away(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users of the machine reach its address, too."""
    monkeypatch.setattr("graphopt.hosts.server.MOST_CONNECTIONS", 4)
    with begun(server, MODEL, more=50) as ours, contextlib.ExitStack() as stack:
        assert answer(server, "GET", "/", {"Host": f"127.0.0.1:{server.server_port}"})[0] == 200
        while server.strangers:  # until the token of the first connection is read
            time.sleep(0.01)
        others = [socket.create_connection(("127.0.0.1", server.server_port), timeout=20) for _ in range(12)]
        for other in map(stack.enter_context, others):
            other.sendall(b"GET /")
        assert [other.recv(1) for other in others[:8]] == [b""] * 8
        assert answer(server, "GET", "/", {"Host": f"127.0.0.1:{server.server_port}"})[0] == 200
        assert len(server.strangers) <= 4
        ours.sendall(bytes(50))
        assert ours.makefile("rb").read().startswith(b"HTTP/1.1 ")


def begun(server: PageServer, model: bytes, more: int = 0) -> socket.socket:
    """Return a connection on which a page has sent a model, of which it said that it has `more` bytes."""
    host = f"127.0.0.1:{server.server_port}"
    lines = [
        "POST /compile HTTP/1.1",
        f"Host: {host}",
        f"Origin: http://{host}",
        f"Authorization: Bearer {server.token}",
        f"Content-Length: {len(model) + more}",
        'graphopt-choice: {"outputs": 3}',
    ]
    connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=120)
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + model)
    return connection


@needs_runtime
def test_large_and_cut_requests_are_answered(server: PageServer) -> None:
    headers = {"Host": f"127.0.0.1:{server.server_port}", "Content-Length": str(2**24)}
    status, text = answer(server, "POST", "/compile", headers, bytes(2**24))
    assert status == 403 and b"expected the token of its address" in text
    with begun(server, MODEL, more=50) as cut:  # such a file may be a whole, other model
        cut.shutdown(socket.SHUT_WR)
        assert cut.makefile("rb").read().startswith(b"HTTP/1.1 400 ")


@needs_runtime
def test_a_compilation_ends(
    server: PageServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It ends when its page is closed, after a while, and where it takes much memory."""
    long, start = classifier(*["Tanh"] * 5000), time.monotonic()
    begun(server, long).close()
    monkeypatch.setattr("graphopt.hosts.server.COMPILE_SECONDS", 2)
    with begun(server, long) as connection:
        text = connection.makefile("rb").read()
        assert text.startswith(b"HTTP/1.1 500 ") and b"expected one that compiles within 2 s" in text
    assert time.monotonic() - start < 20  # the first would take longer
    assert not server.one_at_a_time.locked() and capfd.readouterr().err == ""
    monkeypatch.setattr("graphopt.hosts.server.MEGABYTES", 64)
    with begun(server, MODEL) as connection:
        assert b"within 2 s and 64 MB" in connection.makefile("rb").read()


def test_the_command_tells_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [ROOT / "graphopt" / "hosts" / name for name in ("javascript", "web")]
    names = [path.name for folder in folders for path in folder.iterdir()]
    assert len({*names}) == len(names)  # the page's addresses
    monkeypatch.chdir(tmp_path)
    assert cli.main(["serve"]) == 1
    assert "npm install onnxruntime-web" in capsys.readouterr().err
    package = tmp_path / "node_modules" / "onnxruntime-web"
    (package / "dist").mkdir(parents=True)
    for found, told in (
        ({}, "no version"),
        ([], "no version"),
        ({"version": "1.29.0"}, "1.29.0"),
        ({"version": "2.0.0"}, "2.0.0"),
        ({"version": "x"}, "x"),
    ):
        (package / "package.json").write_text(json.dumps(found))
        assert cli.main(["serve"]) == 1
        assert f"expected onnxruntime-web 1.30 or a later 1.x, found {told}: npm install" in capsys.readouterr().err
    (package / "package.json").write_text('{"version": "1.31.0-dev.1"}')
    assert cli.main(["serve"]) == 1
    assert "ort.webgpu.min.mjs: expected a file of the page, found none" in capsys.readouterr().err
    assert cli.main(["serve", "port=80"]) == 1
    assert "serve: expected no other words, found port=80" in capsys.readouterr().err


@needs_runtime
@pytest.mark.slow
def test_the_command_serves_until_it_is_ended(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-u", "-m", "graphopt", "serve"]
    with subprocess.Popen(command, cwd=TESTS, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline() + process.stdout.readline()  # the runtime, the page
        process.send_signal(signal.SIGTERM)
        assert "http://127.0.0.1:" in said and "#" in said, said
        assert process.wait() == 128 + signal.SIGTERM


def write_table(path: Path, classes: bool) -> dict[str, np.ndarray]:
    """Write a table of 4 columns and a target, and return it as arrays."""
    generator = np.random.default_rng(0)
    kinds = np.arange(60) % 3
    x = np.round(generator.standard_normal((60, 4)) + 2 * np.eye(4)[kinds], 4).astype(np.float32)
    numbers = np.round(x @ [0.5, -1.0, 2.0, 0.25], 4).astype(np.float32)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["size, in cm", "b", "c", "d", "target"])
        writer.writerows([*row, LABELS[kind] if classes else y] for row, kind, y in zip(x, kinds, numbers, strict=True))
    return {"x": x, "target": kinds if classes else numbers[:, None]}


def write_pictures(folder: Path) -> dict[str, np.ndarray]:
    """Write partly transparent pictures of three classes; return their colours as torchvision standardizes them."""
    generator, arrays, targets = np.random.default_rng(1), [], []
    for kind, label in enumerate(LABELS):
        (folder / label).mkdir(parents=True)
        for i in range(6):
            pixels = generator.integers(0, 150, (24, 24, 3))
            pixels[..., kind] += 100
            alpha = generator.integers(0, 256, (24, 24, 1))
            Image.fromarray(np.append(pixels, alpha, 2).astype(np.uint8)).save(folder / label / f"{i}.png")
            arrays.append((pixels / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225])
            targets.append(kind)
    return {"x": np.stack(arrays).transpose(0, 3, 1, 2).astype(np.float32), "target": np.array(targets)}


@needs_runtime
@pytest.mark.slow
@pytest.mark.parametrize("state", ["lost", "wide", "none"])
def test_pictures_keep_their_colours_or_are_refused(state: str, server: PageServer, tmp_path: Path) -> None:
    if not Path(CHROMIUM).exists():
        pytest.skip(f"needs Chromium at {CHROMIUM}")
    sizes = {"clear.png": (8, 8, 100), "plain.png": (8, 8, 255), "wide.png": (40_000, 2, 255)}
    for name, (*size, opacity) in sizes.items():
        Image.new("RGBA", (size[0], size[1]), (200, 100, 50, opacity)).save(tmp_path / name)
    names = ["clear.png", "wide.png" if state == "wide" else "plain.png", "clear.png", "plain.png"]
    color = [200, 100, 50]
    told = "clear.png: expected opaque pixels, found transparent ones, whose colours this browser does not keep"
    found = javascript("in_rows.js", server.address, state, *(tmp_path / name for name in names))
    for name, each in zip(names, found, strict=True):
        assert each.startswith(told) if state == "none" and name == "clear.png" else each == color, (name, each)


def write_any_size(path: Path) -> None:
    """Write a convolution of pictures of any size."""
    helper = onnx.helper
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ("batch", 3, "height", "width"))
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ("batch", 3))
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], strides=[32, 32]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["y"]),
    ]
    weight = np.random.default_rng(0).standard_normal((3, 3, 8, 8)).astype(np.float32) / 10
    path.write_bytes(onnx_file(nodes, x, [y], [onnx.numpy_helper.from_array(weight, "w")]))


def write_residual(path: Path) -> None:
    """Write a residual network in PyTorch as torchvision's are exported: for one picture, of ten classes."""
    torch = pytest.importorskip("torch")
    nn = torch.nn

    class Block(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
            self.bn1, self.bn2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
            self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
            self.downsample = nn.Conv2d(before, after, 1, stride=2, bias=False)

        def forward(self, x: Any) -> Any:
            y = torch.relu(self.bn1(self.conv1(x)))
            return torch.relu(self.bn2(self.conv2(y)) + self.downsample(x))

    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    net = nn.Sequential(*stem, Block(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).eval()
    graphopt.export(net, torch.zeros(1, 3, 24, 24), path)


def trained(trains: str) -> dict[str, Any]:
    if trains == "all":
        return {"parameters": passes.Parameters(unfreeze=["*.weight", "*.bias"]), "adapter": passes.Head(classes=3)}
    heads = [passes.Head(classes=3)]
    return {"adapter": [passes.LoRA(rank=2), *heads] if trains == "lora" else heads}


CASES: dict[str, tuple[Callable[[Path], None], dict[str, Any], dict[str, Any]]] = {
    "table of classes": (
        lambda path: graphopt.save(models.mlp((4,), 3, hidden=[12]), path),
        {"trains": "all", "rate": 0.01, "batch": 20, "epochs": 4},
        {"loss": passes.CrossEntropy(), "optimizer": passes.AdamW(0.01)},
    ),
    "table of classes, of a file with labels first and an open width": (
        lambda path: path.write_bytes(classifier("Softmax", first="label", width="columns")) and None,
        {"trains": "all", "rate": 0.01, "batch": 20, "epochs": 2},
        {"loss": passes.CrossEntropy(output="y1", from_logits=False), "optimizer": passes.AdamW(0.01)},
    ),
    "table of numbers": (
        lambda path: graphopt.save(models.mlp((4,), 1, hidden=[12]), path),
        {"trains": "all", "rate": 0.01, "batch": 7, "epochs": 3, "optimizer": "sgd"},
        {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.01, momentum=0.9)},
    ),
    **{
        f"pictures, {trains}": (
            write_residual,
            {"trains": trains, "rate": 0.02, "batch": 8, "epochs": 2, "optimizer": "sgd", "rank": 2},
            {
                "normalize": passes.Normalize(batch="free"),
                "loss": passes.CrossEntropy(),
                "optimizer": passes.SGD(0.02, momentum=0.9),
                **trained(trains),
            },
        )
        for trains in ("head", "lora", "all")
    },
}


@needs_runtime
@pytest.mark.slow
@pytest.mark.usefixtures("plain")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(3)
def test_the_page_trains_as_python_does(name: str, server: PageServer, tmp_path: Path) -> None:
    if not Path(CHROMIUM).exists():
        pytest.skip(f"needs Chromium at {CHROMIUM}")
    write_model, fields, steps = CASES[name]
    write_model(tmp_path / "net.onnx")
    if name.startswith("table"):
        data = tmp_path / "rows.csv"
        arrays = write_table(data, classes="classes" in name)
    else:
        data = tmp_path / "pictures"
        arrays = write_pictures(data)
    fields = dict(fields)
    if fields["trains"] != "lora":
        fields.pop("rank", None)
    files = (tmp_path / "net.onnx", data, tmp_path / "net.trained.onnx")
    found = javascript("in_served_page.js", server.address, *files, json.dumps(fields))
    assert found["errors"] == [] and found["status"] == "Trained. Download the model, or train on.", found
    is_proven = "The first step is proven on this device." in found["what"]
    assert is_proven == ("open width" not in name)  # for which no batch is known to run

    step = graphopt.compile(tmp_path / "net.onnx", clip=passes.ClipGlobalNorm(1.0), **steps)
    executor, losses = graphopt.Executor(step, threads=1), []
    for order in found["orders"]:
        assert len({*order}) == len(order) and not [row for row in order if row % 5 == 4]
        for start in range(0, len(order), fields["batch"]):
            batch = {key: array[order[start : start + fields["batch"]]] for key, array in arrays.items()}
            losses.append(float(executor.step(dict(zip(step_feeds(step), batch.values(), strict=True)))["loss"]))
    np.testing.assert_allclose(found["losses"], losses, rtol=1e-4)
    trained_model = graphopt.load(tmp_path / "net.trained.onnx")
    assert labels_in(trained_model) == (None if "numbers" in name else LABELS)
    (read,) = (x.name for x in trained_model.graph.inputs)
    *_, expected = graphopt.run(executor.trained(), {read: arrays["x"]}).values()
    *_, predicted = graphopt.run(tmp_path / "net.trained.onnx", {read: arrays["x"]}).values()
    np.testing.assert_allclose(predicted, expected, rtol=1e-4, atol=1e-4)
    held_out, (_, measured) = np.arange(4, len(arrays["x"]), 5), found["measured"][-1]
    right = expected[held_out].argmax(axis=-1) == arrays["target"][held_out]
    errors = np.square(expected[held_out] - arrays["target"][held_out]) if "numbers" in name else right
    np.testing.assert_allclose(measured, errors.mean(), rtol=1e-3)
    np.testing.assert_allclose(found["again"][-1], found["measured"][0])  # of the initial weights


@needs_runtime
@pytest.mark.slow
def test_the_page_takes_pictures_of_any_size_and_tells_what_does_not_fit(server: PageServer, tmp_path: Path) -> None:
    if not Path(CHROMIUM).exists():
        pytest.skip(f"needs Chromium at {CHROMIUM}")
    (tmp_path / "net.onnx").write_bytes(MODEL)
    write_pictures(tmp_path / "pictures")
    write_table(tmp_path / "rows.csv", classes=True)
    cases: list[tuple[dict[str, object], str]] = [
        (
            {"trains": "all"},
            "the model: expected an input of pictures, [rows, channels, height, width], found [batch,4]",
        ),
        ({"trains": "lora", "rank": 9}, "rank"),
        ({"loss-kind": "mean_squared_error"}, "Loss: expected numbers in the target, found classes"),
        ({"rate": 0}, "Learning rate: expected a number above 0, found 0"),
        ({"target": "b"}, "table: row 2: column 'target': expected a number, found 'ant'"),
    ]
    (tmp_path / "long.onnx").write_bytes(classifier(*["Tanh"] * 4000))
    stopped = javascript(
        "in_served_page.js", server.address, tmp_path / "long.onnx", tmp_path / "rows.csv", "none", '{"stops": true}'
    )
    assert stopped["status"] == "Stopped." and stopped["errors"] == [], stopped
    write_any_size(tmp_path / "any.onnx")
    taken = javascript(
        "in_served_page.js",
        server.address,
        tmp_path / "any.onnx",
        tmp_path / "pictures",
        tmp_path / "any.trained.onnx",
        '{"trains": "all", "epochs": 2}',
    )
    assert taken["status"].startswith("Trained.") and taken["errors"] == [], taken
    for fields, message in cases:
        files = (
            tmp_path / "net.onnx",
            tmp_path / ("rows.csv" if "target" in fields else "pictures"),
            tmp_path / "none",
        )
        found = javascript("in_served_page.js", server.address, *files, json.dumps(fields))
        assert message in found["status"] and found["errors"] == found["losses"] == [], found


@pytest.mark.whole
@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,t\n1,1.0\n2,1\n3, 2\n", {"labels": ["1", "2"], "classes": [0, 0, 1]}),
        ('"a;b",t\n1,x\n2,y\n', {"labels": ["x", "y"], "classes": [0, 1]}),
        ("a,t\n1,1.5\n2,\n3,2.5\n", "row 3: column 't': expected a number, found '': fill it in, or leave the row out"),
        ("a,t\n1,1.5\n2,NA\n3,2.5\n", "row 3: column 't': expected a number, found 'NA'"),
        ("a,t\n1,x\n2,\n3,y\n", "row 3: column 't': expected a class, found ''"),
        ("a,t\n1,0\n2,0\n", "column 't': expected two different cells or more, found '0' alone"),
        ('a,t\n1,"x\n2,y\n3,z\n', "row 2: expected a closing quote, found none"),
        ("a,t\n" + "".join(f"1,k{i}\n" for i in range(10001)), "expected at most 10000 classes, found 10001"),
    ],
)
def test_a_table_is_read_or_refused(text: str, expected: dict[str, object] | str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(text)
    module = (ROOT / "graphopt" / "hosts" / "web" / "rows.js").as_uri()
    program = f"""
import {{ readFileSync }} from "node:fs";
import {{ table, withTarget }} from "{module}";
try {{
  const {{ labels, classes }} = withTarget(table(readFileSync("rows.csv", "utf8")), "t");
  console.log(JSON.stringify({{ labels, classes }}));
}} catch ({{ message }}) {{
  console.log(JSON.stringify(message));
}}"""
    command = ["node", "--input-type=module", "--eval", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert expected in found if isinstance(expected, str) else found == expected, found


def step_feeds(step: ir.Model) -> list[str]:
    """Return the names of the data and of the target that a training graph reads."""
    from graphopt.graph.roles import FED, with_role

    return [str(x.name) for x in with_role(step, *FED)]
