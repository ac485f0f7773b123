"""Find the nodes that ONNX Runtime's CUDA provider has no kernel for. They run on the host, with copies to and fro.

The tables list the kernels that onnxruntime-gpu 1.31.1 registers for opset 21. A kernel may still reject a node
because of its attributes. On a GPU, `Executor.placement` reports where each node really runs.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

F = "float16 float double"
BF = "float16 bfloat16 float double"
W = "int32 uint32 int64 uint64 float16 bfloat16 float double"

# Operators with a kernel for every element type that they are defined for.
EVERY_TYPE = """
    Abs Add And AveragePool Cast Compress Concat ConcatFromSequence ConstantOfShape Conv ConvTranspose
    Cos DeformConv Div Dropout Elu Erf Exp Expand Flatten GRU Gather GatherElements Gelu
    GlobalAveragePool GlobalMaxPool HardSigmoid HardSwish Identity If InstanceNormalization IsInf IsNaN
    LSTM Loop MaxPool Mul Neg NonMaxSuppression Not Or RNN RandomNormal RandomNormalLike RandomUniform
    RandomUniformLike Range Reshape ReverseSequence RoiAlign Round Scan ScatterElements ScatterND Selu
    SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength Shape Shrink
    Sigmoid Sign Sin Size Slice Softmax Softplus Softsign Split Sqrt Squeeze Sub Sum Tanh
    ThresholdedRelu Transpose Trilu Unsqueeze Xor
    """

# Operators that are functions of other operators and are expanded into them. No provider has a kernel.
FUNCTIONS = "Bernoulli CastLike CenterCropPad GroupNormalization Mish NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss"

# Operators with kernels for some element types: these types, by the type parameters of the operator's schema.
SOME_TYPES: dict[str, dict[str, str]] = {
    "ArgMax": {"T": F},
    "ArgMin": {"T": F},
    "BatchNormalization": {"T": F, "T1": F, "T2": F},
    "Ceil": {"T": F},
    "Clip": {"T": "int8 uint8 int64 uint64 float16 float double"},
    "CumSum": {"T": "int32 uint32 int64 uint64 float16 float double"},
    "DepthToSpace": {"T": F},
    "DequantizeLinear": {"T1": "int8 uint8", "T2": "float16 float"},
    "Einsum": {"T": F},
    "Equal": {"T": "bool int32 uint32 int64 uint64 float16 float double"},
    "EyeLike": {"T1": "int32 int64 uint64 float double", "T2": "int32 int64 uint64 float double"},
    "Floor": {"T": F},
    "GatherND": {"T": "bool int64 float16 bfloat16 float double"},
    "Gemm": {"T": BF},
    "Greater": {"T": "int32 uint32 int64 uint64 float16 float double"},
    "GreaterOrEqual": {"T": "int32 uint32 int64 uint64 float16 float double"},
    "GridSample": {"T1": "float", "T2": "float"},
    "LRN": {"T": F},
    "LayerNormalization": {"U": "float"},
    "LeakyRelu": {"T": F},
    "Less": {"T": "int32 uint32 int64 uint64 float16 float double"},
    "LessOrEqual": {"T": "int32 uint32 int64 uint64 float16 float double"},
    "Log": {"T": F},
    "LogSoftmax": {"T": F},
    "LpNormalization": {"T": "float16 float"},
    "MatMul": {"T": BF},
    "MatMulInteger": {"T1": "int8", "T2": "int8"},
    "Max": {"T": W},
    "Min": {"T": W},
    "Mod": {"T": W},
    "NonZero": {"T": "bool uint8 int32 int64 float16 float"},
    "OneHot": {"T1": "int32 int64", "T2": "int32 int64", "T3": "int64 float16 float"},
    "PRelu": {"T": F},
    "Pad": {"T": "bool float16 float double"},
    "Pow": {"T1": "int32 int64 float16 bfloat16 float double"},
    "QuantizeLinear": {"T1": "float16 float", "T2": "int8 uint8"},
    "Reciprocal": {"T": F},
    "ReduceL1": {"T": "int32 float16 float double"},
    "ReduceL2": {"T": "int32 float16 float double"},
    "ReduceLogSum": {"T": F},
    "ReduceLogSumExp": {"T": F},
    "ReduceMax": {"T": "int8 uint8 int32 int64 float16 float double"},
    "ReduceMean": {"T": "int32 float16 bfloat16 float double"},
    "ReduceMin": {"T": "int8 uint8 int32 int64 float16 float double"},
    "ReduceProd": {"T": "int32 float16 float double"},
    "ReduceSum": {"T": "int32 int64 float16 bfloat16 float double"},
    "ReduceSumSquare": {"T": F},
    "Relu": {"T": BF},
    "Resize": {"T1": "uint8 int32 float16 float double"},
    "SpaceToDepth": {"T": F},
    "Tile": {"T": "int32 int64 float16 bfloat16 float double"},
    "TopK": {"T": "int8 uint8 int16 int32 int64 float16 float double"},
    "Where": {"T": "uint8 int32 int64 float16 bfloat16 float double"},
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
        if node.op_type in ("Constant", "Shape", "Size") or (
            node.inputs and of_shapes.issuperset(node.inputs)
        ):
            of_shapes.update(node.outputs)
        elif node.domain == "":
            operator = _lacking(node, opset)
            if operator is not None:
                found.setdefault(operator, []).append(node.name or "")
    return found


def _lacking(node: ir.Node, opset: int) -> str | None:
    """Return the operator with the element type that has no kernel, or None if there is a kernel."""
    if node.op_type in f"{EVERY_TYPE} {FUNCTIONS}".split():
        return None
    if node.op_type not in SOME_TYPES:
        return node.op_type
    schema = onnx.defs.get_schema(node.op_type, opset)
    for values, formals in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for i, value in enumerate(values):
            known = SOME_TYPES[node.op_type].get(formals[min(i, len(formals) - 1)].type_str)
            if value is None or value.dtype is None or known is None:
                continue
            if value.dtype.name.lower() not in known.split():
                return f"{node.op_type}({value.dtype.name.lower()})"
    return None
