"""List facts about ONNX's operators, and look up their schemas.

Code that handles an operator is in the pass that does so. A set promises something of the operators that it names, and
nothing of others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import onnx
import onnx_ir as ir

F = TypeVar("F", bound=Callable[..., object])
Attributes = dict[str, Any]  # values of attributes: numbers, texts, tensors, graphs, and sequences of these

STANDARD = ("", "ai.onnx.ml", "ai.onnx.preview.training")  # the domains of ONNX, whose operators never change
MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators
# Operators that ONNX Runtime has in ONNX's domain, and the opset in which ONNX added each of them.
RUNTIMES_OWN = {"LayerNormalization": 17, "SimplifiedLayerNormalization": math.inf}

# Operators that draw random numbers. Evaluators draw different ones; with a seed, an evaluator repeats its own.
DRAWING = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)

# Step functions: the derivative is 0 wherever it exists.
STEP_FUNCTIONS = frozenset({"Ceil", "Floor", "Hardmax", "Round", "Sign"})

# Operators that need not compute the same numbers when they run again.
RANDOM = DRAWING | {"Dropout"}

# Views: the output is the input in another shape, so that a runtime needs no memory for it.
VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})

# Layout: the output has elements of the first input, in blocks and strides. Nothing is computed or gathered.
LAYOUT = VIEWS | {"DepthToSpace", "Expand", "Slice", "SpaceToDepth", "Split", "Tile", "Transpose"}

# Arithmetic: combines numbers of inputs that broadcast against each other.
ARITHMETIC = frozenset({"Add", "Div", "Max", "Mean", "Min", "Mod", "Mul", "Pow", "Sub", "Sum"})

# Predicates: compare numbers or combine truth values; the output is Boolean.
PREDICATES = frozenset(
    {"And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor"}
)

# Elementwise: each element of the only output depends on the elements of the inputs in the same place, as they
# broadcast against each other.
ELEMENTWISE_OPERATORS = frozenset(
    {
        *(ARITHMETIC | PREDICATES),
        *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cos", "Cosh", "Erf", "Exp", "Log"),
        *("BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "Clip", "Floor", "Identity"),
        *("Celu", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Neg", "PRelu", "Relu"),
        *("Reciprocal", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus"),
        *("Softsign", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Where"),
    }
)

# Elementwise operators of one input that take 0 to 0. Clip does if its bounds allow.
ZERO_TO_ZERO = frozenset(
    {
        *("Abs", "Asin", "Asinh", "Atan", "Cast", "Ceil", "Celu", "Clip", "Elu", "Erf", "Floor", "Gelu"),
        *("HardSwish", "Identity", "LeakyRelu", "Mish", "Neg", "Relu", "Round", "Selu", "Sign", "Sin"),
        *("Sinh", "Softsign", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu"),
    }
)

# Matrix products: of the first two inputs, which are floating.
MATRIX_PRODUCTS = frozenset({"Gemm", "MatMul"})

# Convolutions: of the first input with the filters in the second, which are floating; the third is an optional bias.
CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})

# Products: sums of products of the elements of the first two inputs. They take most of a network's time.
PRODUCTS = MATRIX_PRODUCTS | CONVOLUTIONS

# Bilinear operators: linear in the first input and in the second, each while the other is constant; without a third.
# This and the two below hold for floating numbers.
BILINEAR = PRODUCTS | {"Mul"}

# Operators that are linear in the first input, while the others are constant.
LINEAR_IN_FIRST = LAYOUT | {"Div", "Neg", "ReduceMean", "ReduceSum"}

# Operators that are linear in all inputs together: f(s x, s y) = s f(x, y).
JOINTLY_LINEAR = frozenset({"Add", "Concat", "Mean", "Sub", "Sum"})

# The indices of the inputs that the states of a recurrent operator start from, by the operator.
INITIAL_STATES = {"GRU": (5,), "LSTM": (5, 6), "RNN": (5,)}

# Recurrent operators: a cell runs over a sequence. The second input holds the weights, the third those of the state.
RECURRENT = frozenset(INITIAL_STATES)

# Literals: the numbers are in an attribute.
LITERALS = frozenset({"Constant", "ConstantOfShape"})

# Operators that read the shape of their input and none of its elements.
SHAPE_READERS = frozenset({"Shape", "Size"})

# Operators that make much of little: numbers in an input say how many elements the output has.
GROWING = frozenset({"ConstantOfShape", "Expand", "OneHot", "Pad", "Range", "Tile"})

# Pools: each window of the spatial axes becomes one number. With `ceil_mode`, a last partial window counts.
POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})

# Scatters: the output is the first input with updates written into it.
SCATTERING = frozenset({"Scatter", "ScatterElements", "ScatterND", "TensorScatter"})

# Operators that take a sequence of tensors and return a tensor.
SEQUENCE_READERS = frozenset({"ConcatFromSequence", "SequenceAt", "SequenceLength"})

# Products of integers, whose first input is rounded by its own range.
DYNAMIC_PRODUCTS = {"ConvInteger", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat"}

# Operators that compute with integers in place of floating-point numbers, and have no other form here.
INTEGER_OPERATORS = {"QAttention", "QEmbedLayerNormalization", "QLinearReduceMean"}

# Operators whose results need no rounding: an operand, its sign or magnitude, or what a cast rounds itself.
CHOOSING = frozenset({"Abs", "Cast", "Identity", "Max", "Min", "Neg", "Relu", "Sign", "Where"})


def _cached_for_onnx(function: F) -> F:
    """Cache the results of a function of a domain, unless it is a user's, who may register schemas at any time."""
    cached = functools.cache(function)

    @functools.wraps(function)
    def looked_up(domain: str, *others: object) -> object:
        return (cached if domain in STANDARD else function)(domain, *others)

    return cast(F, looked_up)


@_cached_for_onnx
def schema_of(domain: str, op_type: str, version: int) -> onnx.defs.OpSchema | None:
    """Return the schema of an operator in an opset, or None if it is unknown there."""
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None


def formal_of(schema: onnx.defs.OpSchema, index: int) -> onnx.defs.OpSchema.FormalParameter:
    """Return the declaration of an input; the last one declares all that follow it."""
    return schema.inputs[min(index, len(schema.inputs) - 1)]


@_cached_for_onnx
def defaults(domain: str, op_type: str, version: int) -> Attributes:
    """Return the default values of an operator's attributes; of an unknown operator, an empty mapping."""
    schema = schema_of(domain, op_type, version)
    attributes = {} if schema is None else schema.attributes
    protos = {name: attribute.default_value for name, attribute in attributes.items()}
    return {name: ir.serde.deserialize_attribute(proto).value for name, proto in protos.items() if proto.name}


@_cached_for_onnx
def input_name(domain: str, op_type: str, version: int, index: int) -> str:
    """Return the name of an operator's input, or its index if the operator is unknown."""
    schema = schema_of(domain, op_type, version)
    if schema is None:
        return f"input {index}"
    formal = formal_of(schema, index)
    variadic = formal.option == onnx.defs.OpSchema.FormalParameterOption.Variadic
    return f"{formal.name}[{index - len(schema.inputs) + 1}]" if variadic else formal.name


def takes(dtype: ir.DataType, version: int, node: ir.Node, index: int) -> bool:
    """Return whether an input of a node accepts a floating-point type; a few accept float32 only."""
    if node.domain != "":
        return True
    types = formal_of(onnx.defs.get_schema(node.op_type, version, ""), index).types
    return not any("float" in name for name in types) or _type_name(dtype) in types


def fits(schema: onnx.defs.OpSchema, inputs: Sequence[ir.Value | None]) -> bool:
    """Return whether a schema allows the element types of inputs, as far as these are known."""
    typed = [(i, x.dtype) for i, x in enumerate(inputs) if x and isinstance(x.type, ir.TensorType)]
    return all(_type_name(dtype) in formal_of(schema, i).types for i, dtype in typed if dtype is not None)


def _type_name(dtype: ir.DataType) -> str:
    return f"tensor({dtype.name.lower()})"


def attributes_of(node: ir.Node) -> Attributes:
    """Return the values of a node's attributes, of which a file keeps numbers in float32."""
    return {name: _as_kept(attribute) for name, attribute in node.attributes.items()}


def _as_kept(attribute: ir.Attr) -> Any:
    """Return the value of an attribute as a file has it."""
    if attribute.type is ir.AttributeType.FLOAT and not attribute.is_ref():
        return float(np.float32(attribute.value))
    if attribute.type is ir.AttributeType.FLOATS and not attribute.is_ref():
        return tuple(map(float, np.array(attribute.value, np.float32)))
    return attribute.value


def full_attributes(node: ir.Node, versions: Mapping[str, int]) -> Attributes:
    """Return the values of a node's attributes, including the schema's defaults."""
    return defaults(node.domain, node.op_type, versions.get(node.domain, 1)) | attributes_of(node)
