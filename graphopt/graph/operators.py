"""List facts about ONNX's operators. Code that handles an operator is in the pass that does so.

A set promises something of the operators that it names, and nothing of others.
"""

from __future__ import annotations

MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators

# --- Random numbers ---

# Operators that draw random numbers. Evaluators draw different ones; with a seed, an evaluator repeats its own.
DRAWING = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)

# Operators that need not compute the same numbers when they run again.
RANDOM = DRAWING | {"Dropout"}

# --- Layout ---

# Views: the output is the input in another shape, so that a runtime needs no memory for it.
VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})

# Layout: the output has elements of the first input, in blocks and strides. Nothing is computed or gathered.
LAYOUT = VIEWS | {"DepthToSpace", "Expand", "Slice", "SpaceToDepth", "Split", "Tile", "Transpose"}

# --- Elementwise ---

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

# --- Products ---

# Matrix products: of the first two inputs, which are floating.
MATRIX_PRODUCTS = frozenset({"Gemm", "MatMul"})

# Convolutions: of the first input with the filters in the second, which are floating; the third is an optional bias.
CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})

# Products: sums of products of the elements of the first two inputs. They take most of a network's time.
PRODUCTS = MATRIX_PRODUCTS | CONVOLUTIONS

# --- Linearity, of floating numbers ---

# Bilinear operators: linear in the first input and in the second, each while the other is constant; without a third.
BILINEAR = PRODUCTS | {"Mul"}

# Operators that are linear in the first input, while the others are constant.
LINEAR_IN_FIRST = LAYOUT | {"Div", "Neg", "ReduceMean", "ReduceSum"}

# Operators that are linear in all inputs together: f(s x, s y) = s f(x, y).
JOINTLY_LINEAR = frozenset({"Add", "Concat", "Mean", "Sub", "Sum"})

# --- Recurrence ---

# The indices of the inputs that the states of a recurrent operator start from, by the operator.
INITIAL_STATES = {"GRU": (5,), "LSTM": (5, 6), "RNN": (5,)}

# Recurrent operators: a cell runs over a sequence. The second input holds the weights, the third those of the state.
RECURRENT = frozenset(INITIAL_STATES)

# --- Further kinds ---

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

# Operators that compute with integers in place of floating-point numbers, of ONNX and ONNX Runtime.
INTEGER_OPERATORS = {
    *("ConvInteger", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat"),
    *("QAttention", "QEmbedLayerNormalization", "QGemm", "QLinearConv", "QLinearMatMul", "QMoE"),
    *("QLinearAdd", "QLinearAveragePool", "QLinearConcat", "QLinearGlobalAveragePool", "QLinearLeakyRelu"),
    *("QLinearMul", "QLinearReduceMean", "QLinearSigmoid", "QLinearSoftmax", "QLinearWhere"),
}

# Operators whose results need no rounding: an operand, its sign or magnitude, or what a cast rounds itself.
CHOOSING = frozenset({"Abs", "Cast", "Identity", "Max", "Min", "Neg", "Relu", "Sign", "Where"})
