"""Find the nodes that ONNX Runtime's CUDA provider has no kernel for. They run on the host, with copies to and fro.

The tables list the kernels that onnxruntime-gpu 1.31.1 registers for opset 21. A kernel may still reject a node
because of its attributes. On a GPU, `Executor.placement` reports where each node really runs.
"""

from __future__ import annotations

from collections.abc import Set

import onnx
import onnx_ir as ir

from graphopt.graph.operators import SHAPE_READERS

FLOATS = frozenset({"float16", "float", "double"})
ALL_FLOATS = FLOATS | {"bfloat16"}
BYTES = frozenset({"int8", "uint8"})
INTS = frozenset({"int32", "int64"})
LARGE_INTEGERS = INTS | {"uint32", "uint64"}

# Operators with a kernel for every element type that they are defined for.
EVERY_TYPE = frozenset(
    {
        *("Abs", "Add", "And", "AveragePool", "Cast", "Compress", "Concat", "ConcatFromSequence"),
        *("ConstantOfShape", "Conv", "ConvTranspose", "Cos", "DeformConv", "Div", "Dropout", "Elu", "Erf"),
        *("Exp", "Expand", "Flatten", "GRU", "Gather", "GatherElements", "Gelu", "GlobalAveragePool"),
        *("GlobalMaxPool", "HardSigmoid", "HardSwish", "Identity", "If", "InstanceNormalization", "IsInf"),
        *("IsNaN", "LSTM", "Loop", "MaxPool", "Mul", "Neg", "NonMaxSuppression", "Not", "Or", "RNN"),
        *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Range", "Reshape"),
        *("ReverseSequence", "RoiAlign", "Round", "Scan", "ScatterElements", "ScatterND", "Selu"),
        *("SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert"),
        *("SequenceLength", "Shape", "Shrink", "Sigmoid", "Sign", "Sin", "Size", "Slice", "Softmax"),
        *("Softplus", "Softsign", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Tanh", "ThresholdedRelu"),
        *("Transpose", "Trilu", "Unsqueeze", "Xor"),
    }
)

# Functions of other operators, which stand in for them: no provider has a kernel.
FUNCTIONS = frozenset(
    {
        *("Bernoulli", "CastLike", "CenterCropPad", "GroupNormalization", "Mish"),
        *("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"),
    }
)

# Operators with kernels for some: the types, by the type parameters of the operator's schema.
SOME_TYPES: dict[str, dict[str, Set[str]]] = {
    "ArgMax": {"T": FLOATS},
    "ArgMin": {"T": FLOATS},
    "BatchNormalization": {"T": FLOATS, "T1": FLOATS, "T2": FLOATS},
    "Ceil": {"T": FLOATS},
    "Clip": {"T": BYTES | FLOATS | {"int64", "uint64"}},
    "CumSum": {"T": LARGE_INTEGERS | FLOATS},
    "DepthToSpace": {"T": FLOATS},
    "DequantizeLinear": {"T1": BYTES, "T2": {"float16", "float"}},
    "Einsum": {"T": FLOATS},
    "Equal": {"T": LARGE_INTEGERS | FLOATS | {"bool"}},
    "EyeLike": {"T1": INTS | {"uint64", "float", "double"}, "T2": INTS | {"uint64", "float", "double"}},
    "Floor": {"T": FLOATS},
    "GatherND": {"T": ALL_FLOATS | {"bool", "int64"}},
    "Gemm": {"T": ALL_FLOATS},
    "Greater": {"T": LARGE_INTEGERS | FLOATS},
    "GreaterOrEqual": {"T": LARGE_INTEGERS | FLOATS},
    "GridSample": {"T1": {"float"}, "T2": {"float"}},
    "LRN": {"T": FLOATS},
    "LayerNormalization": {"U": {"float"}},
    "LeakyRelu": {"T": FLOATS},
    "Less": {"T": LARGE_INTEGERS | FLOATS},
    "LessOrEqual": {"T": LARGE_INTEGERS | FLOATS},
    "Log": {"T": FLOATS},
    "LogSoftmax": {"T": FLOATS},
    "LpNormalization": {"T": {"float16", "float"}},
    "MatMul": {"T": ALL_FLOATS},
    "MatMulInteger": {"T1": {"int8"}, "T2": {"int8"}},
    "Max": {"T": LARGE_INTEGERS | ALL_FLOATS},
    "Min": {"T": LARGE_INTEGERS | ALL_FLOATS},
    "Mod": {"T": LARGE_INTEGERS | ALL_FLOATS},
    "NonZero": {"T": INTS | {"bool", "uint8", "float16", "float"}},
    "OneHot": {"T1": INTS, "T2": INTS, "T3": {"int64", "float16", "float"}},
    "PRelu": {"T": FLOATS},
    "Pad": {"T": FLOATS | {"bool"}},
    "Pow": {"T1": INTS | ALL_FLOATS},
    "QuantizeLinear": {"T1": {"float16", "float"}, "T2": BYTES},
    "Reciprocal": {"T": FLOATS},
    "ReduceL1": {"T": FLOATS | {"int32"}},
    "ReduceL2": {"T": FLOATS | {"int32"}},
    "ReduceLogSum": {"T": FLOATS},
    "ReduceLogSumExp": {"T": FLOATS},
    "ReduceMax": {"T": INTS | BYTES | FLOATS},
    "ReduceMean": {"T": ALL_FLOATS | {"int32"}},
    "ReduceMin": {"T": INTS | BYTES | FLOATS},
    "ReduceProd": {"T": FLOATS | {"int32"}},
    "ReduceSum": {"T": INTS | ALL_FLOATS},
    "ReduceSumSquare": {"T": FLOATS},
    "Relu": {"T": ALL_FLOATS},
    "Resize": {"T1": FLOATS | {"uint8", "int32"}},
    "SpaceToDepth": {"T": FLOATS},
    "Tile": {"T": INTS | ALL_FLOATS},
    "TopK": {"T": INTS | BYTES | FLOATS | {"int16"}},
    "Where": {"T": INTS | ALL_FLOATS | {"uint8"}},
}


def without_cuda_kernel(model: ir.Model) -> dict[str, list[str]]:
    """Return the operators that have no CUDA kernel in their nodes' element type, and those nodes' names.

    The result omits operators outside ONNX's own domain, constants, which become part of the session, and arithmetic
    on shapes, which always runs on the host.
    """
    found: dict[str, list[str]] = {}
    opset = min(model.opset_imports.get("", 21), 21)
    of_shapes: set[ir.Value | None] = {None, *model.graph.initializers.values()} - set(model.graph.inputs)
    for node in model.graph.all_nodes():
        reads_shapes = node.op_type in SHAPE_READERS or of_shapes.issuperset(node.inputs)
        if node.op_type == "Constant" or (node.inputs and reads_shapes):
            of_shapes.update(node.outputs)
        elif node.domain == "":
            operator = _lacking(node, opset)
            if operator is not None:
                found.setdefault(operator, []).append(node.name or "")
    return found


def _lacking(node: ir.Node, opset: int) -> str | None:
    """Return the operator with the element type that has no kernel, or None if there is a kernel."""
    if node.op_type in EVERY_TYPE or node.op_type in FUNCTIONS:
        return None
    if node.op_type not in SOME_TYPES:
        return node.op_type
    schema = onnx.defs.get_schema(node.op_type, opset)
    for values, formals in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for i, value in enumerate(values):
            known = SOME_TYPES[node.op_type].get(formals[min(i, len(formals) - 1)].type_str)
            if value is None or value.dtype is None or known is None:
                continue
            if value.dtype.name.lower() not in known:
                return f"{node.op_type}({value.dtype.name.lower()})"
    return None
