"""Small models for tests, written in ONNX's text form."""

from __future__ import annotations

import itertools

import numpy as np
import onnx

from graphopt.testing.properties import reference_steps as run  # noqa: F401


def model(text: str, opset: int = 21, dtype: type = np.float32, **weights: np.ndarray) -> onnx.ModelProto:
    """Return the model of a graph in ONNX's text form, with its weights as initializers."""
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}')
    for name, array in weights.items():
        array = array.astype(dtype) if array.dtype.kind == "f" else array
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


def linear(features: int = 3, outputs: int = 2, dtype: type = np.float32, seed: int = 0) -> onnx.ModelProto:
    """Return y = x w + b."""
    rng = np.random.default_rng(seed)
    t = TYPES[dtype]
    return model(
        f"g ({t}[N,{features}] x) => ({t}[N,{outputs}] y) {{ p = MatMul(x, w)\n y = Add(p, b) }}",
        dtype=dtype,
        w=rng.standard_normal((features, outputs)),
        b=rng.standard_normal(outputs),
    )


def mlp(
    sizes: tuple[int, ...] = (4, 8, 3), activation: str = "Tanh", dtype: type = np.float32, seed: int = 0
) -> onnx.ModelProto:
    """Return a chain of Gemms with an activation between them."""
    rng = np.random.default_rng(seed)
    t = TYPES[dtype]
    lines, weights, last = [], {}, "x"
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        weights[f"fc{i}.weight"] = rng.standard_normal((fan_out, fan_in)) / np.sqrt(fan_in)
        weights[f"fc{i}.bias"] = rng.standard_normal(fan_out) / 4
        end = i == len(sizes) - 2
        lines.append(f'{"y" if end else f"h{i}"} = Gemm<transB=1>({last}, "fc{i}.weight", "fc{i}.bias")')
        if not end:
            lines.append(f"a{i} = {activation}(h{i})")
        last = f"a{i}"
    text = f"g ({t}[N,{sizes[0]}] x) => ({t}[N,{sizes[-1]}] y) {{ " + "\n".join(lines) + " }"
    return model(text, dtype=dtype, **weights)


GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2)}  # where ONNX's gates are among PyTorch's


def by_gates(
    op_type: str = "LSTM", features: int = 3, units: int = 2, seed: int = 0, **weights: np.ndarray
) -> onnx.ModelProto:
    """Return an LSTM or a GRU over 4 steps whose weights, in PyTorch's order of gates, the graph lays out for ONNX.

    So does PyTorch's exporter without its optimization.

    Args:
        weights: `weight_ih`, `weight_hh`, `bias_ih` and `bias_hh`; by default, random ones.
    """
    order = GATES[op_type]
    rng, n = np.random.default_rng(seed), len(order) * units
    shapes = {"weight_ih": (n, features), "weight_hh": (n, units), "bias_ih": (n,), "bias_hh": (n,)}
    weights = {name: rng.standard_normal(shape) / 2 for name, shape in shapes.items()} | weights
    lines = [f"c{i} = Constant<value_ints=[{i * units}]>()" for i in range(len(order) + 1)]
    for name in shapes:
        lines += [f"{name}_{i} = Slice({name}, c{i}, c{i + 1}, c0)" for i in range(len(order))]
        lines.append(f"{name}_o = Concat<axis=0>({', '.join(f'{name}_{i}' for i in order)})")
    lines.append("bias_o = Concat<axis=0>(bias_ih_o, bias_hh_o)")
    lines += [f"{name}_1d = Unsqueeze({name}_o, c0)" for name in ("weight_ih", "weight_hh", "bias")]
    reset = ", linear_before_reset=1" if op_type == "GRU" else ""
    lines.append(f"h, last = {op_type}<hidden_size={units}{reset}>(x, weight_ih_1d, weight_hh_1d, bias_1d)")
    lines.append("y = Squeeze(last, c0)")
    return model(
        f"g (float[4,N,{features}] x) => (float[N,{units}] y) {{ {' '.join(lines)} }}",
        **weights,
    )


def attention(dtype: type = np.float32, seed: int = 0) -> onnx.ModelProto:
    """Return a block of self-attention over 6 positions of 4 numbers, with a residual connection."""
    rng = np.random.default_rng(seed)
    t = TYPES[dtype]
    return model(
        f"""g ({t}[N,6,4] x) => ({t}[N,6,4] y) {{
            n = LayerNormalization(x, scale, shift)
            q = MatMul(n, query)
            k = MatMul(n, key)
            v = MatMul(n, value)
            t = Transpose<perm=[0,2,1]>(k)
            s = MatMul(q, t)
            a = Softmax(s)
            m = MatMul(a, v)
            y = Add(x, m)
        }}""",
        dtype=dtype,
        scale=np.ones(4),
        shift=np.zeros(4),
        **{name: rng.standard_normal((4, 4)) for name in ("query", "key", "value")},
    )


def identity(shape: str, dtype: str = "float") -> onnx.ModelProto:
    """Return y = x + w, of a parameter w that starts at zero: a loss of it is a loss of x."""
    proto = model(f"g ({dtype}[{shape}] x) => ({dtype}[{shape}] y) {{ y = Add(x, w) }}")
    zeros = np.zeros((1,), onnx.helper.tensor_dtype_to_np_dtype(proto.graph.input[0].type.tensor_type.elem_type))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(zeros, "w"))
    return proto


TYPES = {np.float16: "float16", np.float32: "float", np.float64: "double"}
