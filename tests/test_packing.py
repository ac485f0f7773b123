"""Rows of several sequences: losses and gradients equal PyTorch's, sequence by sequence."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from test_causal_language_model import by_graphopt, decoder
from torch import nn

import graphopt
import passes

TOKENS, WIDTH, HEADS, CLASSES = 9, 16, 2, 11
HALF = WIDTH // HEADS // 2
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, CLASSES, (2, TOKENS))
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2], [5, 5, 3, 3, 3, 3, -1, -1, -1]])
SEQUENCES = [(0, 0, 3), (0, 3, 7), (0, 7, 9), (1, 0, 2), (1, 2, 6)]  # row, first and last token
ANGLES = np.outer(np.arange(TOKENS), 0.5 ** np.arange(HALF))


class Decoder(nn.Module):
    """One layer of attention, with positions that are learnt, rotate queries and keys, or are left out."""

    def __init__(self, positions: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions = positions
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.learnt = nn.Embedding(2 * TOKENS, WIDTH) if positions == "learnt" else None
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) if positions == "module" else None
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        places = torch.arange(input_ids.shape[1])
        if self.learnt is not None:
            x = x + self.learnt(places)
        if self.attention is not None:
            mask = places[:, None] < places[None]
            y, _ = self.attention(x, x, x, attn_mask=mask, need_weights=True)
            return self.head(torch.tanh(x + y))
        q, k, v = (layer(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.positions == "rotary":
            angles = places[:, None] * 0.5 ** torch.arange(HALF)
            q, k = (self.rotated(x, angles.cos(), angles.sin()) for x in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(torch.tanh(x + self.o(y.transpose(1, 2).flatten(2))))

    def rotated(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)


@functools.cache
def exported(positions: str) -> tuple[nn.Module, onnx.ModelProto]:
    """Return a module and the file that PyTorch exports."""
    module = Decoder(positions).eval()
    dynamic = {"input_ids": {1: torch.export.Dim("tokens", min=2, max=TOKENS)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module, (torch.tensor(IDS),), dynamo=True, dynamic_shapes=dynamic, verbose=False)
    assert program is not None
    return module, program.model_proto


def builder_s() -> tuple[nn.Module, onnx.ModelProto]:
    """Return a module of rotary positions, and a file of the form that onnxruntime-genai's builder writes."""
    module = Decoder("rotary").eval()
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        g (int64[N,S] input_ids, int32[N] seqlens_k, int32 total) => (float[N,S,{CLASSES}] logits) {{
            x = Gather(table, input_ids)
            q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)
            y, present_k, present_v = com.microsoft.GroupQueryAttention<num_heads = {HEADS}, kv_num_heads = {HEADS},
                do_rotary = 1>(q, k, v, , , seqlens_k, total, cosines, sines)
            z = MatMul(y, wo) s = Add(x, z) t = Tanh(s) logits = MatMul(t, head) }}"""
    )
    layers = {"wq": module.q, "wk": module.k, "wv": module.v, "wo": module.o, "head": module.head}
    weights = {name: layer.weight.T.detach().numpy() for name, layer in layers.items()}
    weights |= {
        "table": module.table.weight.detach().numpy(),
        "cosines": np.cos(ANGLES),
        "sines": np.sin(ANGLES),
    }
    for name, array in weights.items():
        array = np.ascontiguousarray(array, np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return module, proto


def by_torch(module: nn.Module) -> dict[str, Any]:
    """Return the mean loss over the tokens of all sequences, each alone, and its gradients."""
    module = module.double()
    module.zero_grad()
    terms = []
    for row, first, last in SEQUENCES:
        ids = torch.tensor(IDS[[row], first:last])
        terms.append(F.cross_entropy(module(ids)[0, :-1], ids[0, 1:], reduction="sum"))
    loss = torch.stack(terms).sum() / sum(last - first - 1 for _, first, last in SEQUENCES)
    loss.backward()
    gradients = {name: x.grad.numpy() for name, x in module.named_parameters() if x.grad is not None}
    module.float()
    return {"loss": float(loss.detach()), **gradients}


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [None, 3])
@pytest.mark.parametrize("positions", ["learnt", "rotary", "none", "GroupQueryAttention", "module"])
def test_packed_rows_train_as_their_sequences(positions: str, blocks: int | None) -> None:
    module, proto = builder_s() if positions == "GroupQueryAttention" else exported(positions)
    expected = by_torch(module)
    loss = passes.CausalLanguageModel(packed=True, blocks=blocks)
    found, executor = by_graphopt(proto, loss, {"input_ids": IDS, "segments": SEGMENTS})
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert len(found) > 5
    for name, gradient in list(found.items())[1:]:
        of_torch = [way for array in list(expected.values())[1:] for way in (array, array.T)]
        alike = [array for array in of_torch if array.shape == gradient.shape]
        assert any(np.allclose(array, gradient, rtol=0, atol=1e-6) for array in alike), name
    before = executor.evaluate(input_ids=IDS, segments=SEGMENTS)["loss"]
    assert executor.step(input_ids=IDS, segments=SEGMENTS)["loss"] == pytest.approx(before, rel=1e-6)


@pytest.mark.slow
def test_prediction_and_the_trained_model_know_no_segments() -> None:
    module, proto = exported("learnt")
    loss = passes.CausalLanguageModel(packed=True)
    executor = graphopt.Executor(graphopt.compile(proto, loss=loss, optimizer=passes.SGD(0.1)))
    with torch.no_grad():
        expected = module(torch.tensor(IDS)).numpy()
    name = executor.outputs[1]
    np.testing.assert_allclose(executor.predict(input_ids=IDS)[name], expected, atol=1e-5)
    trained = executor.trained()
    assert [x.name for x in trained.graph.input] == ["input_ids"]
    np.testing.assert_allclose(graphopt.run(trained, {"input_ids": IDS})[name], expected, atol=1e-5)


def test_other_mixtures_of_tokens_are_refused() -> None:
    with pytest.raises(graphopt.GraphoptError, match=r"packed=True\): expected attention alone .* found no attention"):
        graphopt.compile(decoder(), loss=passes.CausalLanguageModel(packed=True))
    recurrent = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (int64[N,5] input_ids) => (float[N,5,3] logits) '
        "{ x = Gather(table, input_ids) c = CumSum(x, axis) logits = MatMul(c, head) }"
    )
    for name, array in {"table": np.ones((3, 4), np.float32), "head": np.ones((4, 3), np.float32)}.items():
        recurrent.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    recurrent.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1, np.int64), "axis"))
    with pytest.raises(graphopt.GraphoptError, match=r"found CumSum node"):
        graphopt.compile(recurrent, loss=passes.CausalLanguageModel(packed=True))
