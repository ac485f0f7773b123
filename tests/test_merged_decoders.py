"""Decoders in optimum's merged form train by the branch without a cache, and return to a file with both branches."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import graphopt
import passes

RNG = np.random.default_rng(3)
B, S, E, D, CLASSES = 2, 5, 4, 16, 11
SPLIT = "{y}r = Reshape({x}, four) {y} = Transpose<perm = [0, 2, 1, 3]>({y}r)"
ATTENDED = """{y}t = Transpose<perm = [0, 1, 3, 2]>({k}) {y}s = MatMul({q}, {y}t) {y}m = {masked}
    {y}p = Softmax<axis = -1>({y}m) {y}a = MatMul({y}p, {v}) {y}b = Transpose<perm = [0, 2, 1, 3]>({y}a)
    {y}c = Reshape({y}b, three) {y} = MatMul({y}c, {w})"""
# Each query sees the keys up to its own place, counted from the end.
MASK = """one = Constant<value = int64 {{1}}>() qn{p} = Shape<start = 2, end = 3>({p}q)
    kn{p} = Shape<start = 2, end = 3>({p}k) n{p} = Concat<axis = 0>(qn{p}, kn{p}) less{p} = Sub(kn{p}, qn{p})
    after{p} = Add(less{p}, one) ones{p} = ConstantOfShape<value = float[1] {{-10000.0}}>(n{p})
    shift{p} = Squeeze(after{p}) mask{p} = Trilu<upper = 1>(ones{p}, shift{p})"""


def branch(prefix: str, cached: bool, crossed: bool) -> str:
    """Return a branch: a layer of attention to the tokens and, if `crossed`, of attention to an encoder's output."""
    p, names = prefix, ("k", "v")
    lines = [
        f"four = Constant<value = int64[4] {{0, 0, 2, 8}}>() three = Constant<value = int64[3] {{0, 0, {D}}}>()",
        f"{p}x = Gather(words, input_ids)",
        *(f"{p}{y}1 = MatMul({p}x, w{y}) " + SPLIT.format(x=f"{p}{y}1", y=f"{p}{y}n") for y in "qkv"),
        f"{p}q = Identity({p}qn)",
        *(f"{p}{y} = " + (f"Concat<axis = 2>(past_{y}, {p}{y}n)" if cached else f"Identity({p}{y}n)") for y in names),
        MASK.format(p=p),
        ATTENDED.format(y=f"{p}h", q=f"{p}q", k=f"{p}k", v=f"{p}v", w="wo", masked=f"Add({p}hs, mask{p})"),
    ]
    last, outputs = f"{p}h", [f"float[B,2,T,8] {p}k", f"float[B,2,T,8] {p}v"]
    if crossed:
        lines.append(f"{p}cq1 = MatMul({p}h, cq) " + SPLIT.format(x=f"{p}cq1", y=f"{p}cq"))
        for y in names:
            if cached:
                lines.append(f"{p}c{y} = Identity(past_c{y})")
            else:
                lines.append(f"{p}c{y}1 = MatMul(encoded, c{y}) " + SPLIT.format(x=f"{p}c{y}1", y=f"{p}c{y}"))
        form = {"q": f"{p}cq", "k": f"{p}ck", "v": f"{p}cv", "w": "co", "masked": f"Identity({p}zs)"}
        lines += [ATTENDED.format(y=f"{p}z", **form), f"{p}u = Add({p}h, {p}z)"]
        last, outputs = f"{p}u", [*outputs, f"float[B,2,E,8] {p}ck", f"float[B,2,E,8] {p}cv"]
    lines.append(f"{p}logits = MatMul({last}, head)")
    results = ", ".join([f"float[B,S,{CLASSES}] {p}logits", *outputs])
    return f"() => ({results}) {{ " + "\n".join(lines) + " }"


def decoder(crossed: bool, opset: int) -> onnx.ModelProto:
    """Return a merged decoder, whose branches read the same weights."""
    caches = ["k", "v", *(["ck", "cv"] if crossed else [])]
    sizes = {x: "E" if x.startswith("c") else "P" for x in caches}
    inputs = ["int64[B,S] input_ids", *([f"float[B,E,{D}] encoded"] if crossed else [])]
    inputs += [f"float[B,2,{size},8] past_{x}" for x, size in sizes.items()]
    outputs = [f"float[B,S,{CLASSES}] logits"]
    outputs += [f"float[B,2,{'E' if x.startswith('c') else 'T'},8] present_{x}" for x in caches]
    names = ", ".join(["logits", *(f"present_{x}" for x in caches)])
    text = f"""<ir_version: 8, opset_import: ["" : {opset}]>
        g ({", ".join(inputs)}, bool[1] use_cache_branch) => ({", ".join(outputs)}) {{
            {names} = If (use_cache_branch) <then_branch = with_past {branch("a_", True, crossed)},
                else_branch = without_past {branch("b_", False, crossed)}> }}"""
    proto = onnx.parser.parse_model(text)
    shapes = {"words": (CLASSES, D), "head": (D, CLASSES), **dict.fromkeys(("wq", "wk", "wv", "wo"), (D, D))}
    shapes |= dict.fromkeys(("cq", "ck", "cv", "co"), (D, D)) if crossed else {}
    for name, shape in shapes.items():
        w = RNG.standard_normal(shape).astype(np.float32) / 2
        proto.graph.initializer.append(onnx.numpy_helper.from_array(w, name))
    onnx.checker.check_model(proto, full_check=True)
    return proto


def run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray], past: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run the branch with a cache if there is a past, and otherwise the other one, whose past is empty."""
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    empty = {x.name: np.zeros((B, 2, 0, 8), np.float32) for x in session.get_inputs() if x.name.startswith("past")}
    fed = {**feeds, **empty, **past, "use_cache_branch": np.array([bool(past)])}
    names = [y.name for y in session.get_outputs()]
    return dict(zip(names, session.run(names, fed), strict=True))


def by_cache(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Return the logits of all tokens, of which the cache has the first three."""
    ids = feeds["input_ids"]
    first = run(proto, {**feeds, "input_ids": ids[:, :3]}, {})
    past = {x.replace("present", "past"): y for x, y in first.items() if x != "logits"}
    rest = run(proto, {**feeds, "input_ids": ids[:, 3:]}, past)
    return np.concatenate([first["logits"], rest["logits"]], axis=1)


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize("crossed", [False, True], ids=["decoder", "decoder of an encoder"])
def test_a_merged_decoder_trains_by_its_branch_without_a_cache(crossed: bool, opset: int) -> None:
    proto = decoder(crossed, opset)
    feeds = {"input_ids": RNG.integers(0, CLASSES, (B, S))}
    if crossed:
        feeds["encoded"] = RNG.standard_normal((B, E, D)).astype(np.float32)
    expected = run(proto, feeds, {})["logits"]
    np.testing.assert_allclose(by_cache(proto, feeds), expected, atol=1e-5)
    step = graphopt.compile(proto, loss=passes.CausalLanguageModel(), optimizer=passes.SGD(0.01))
    executor = graphopt.Executor(step, threads=1)
    assert {*executor.predict(**feeds)} == {"logits"}
    assert list(executor.inputs) == list(feeds)
    assert {*executor.parameters} == {x.name for x in proto.graph.initializer}
    np.testing.assert_allclose(executor.predict(**feeds)["logits"], expected, atol=1e-5)
    losses = [executor.step(**feeds)["loss"] for _ in range(10)]
    assert losses[-1] < losses[0] - 0.1
    trained = executor.trained(into=proto)
    assert [x.name for x in trained.graph.input] == [x.name for x in proto.graph.input]
    np.testing.assert_allclose(by_cache(trained, feeds), executor.predict(**feeds)["logits"], atol=1e-5)
