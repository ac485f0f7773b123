"""Operators without gradient: they compare, count, choose, round or draw; no small change shows."""

from passes.gradient.registry import no_gradient

no_gradient(
    # Comparison and logic.
    *(
        "And",
        "Equal",
        "Greater",
        "GreaterOrEqual",
        "IsInf",
        "IsNaN",
        "Less",
        "LessOrEqual",
        "Not",
        "Or",
        "Xor",
    ),
    # Integers.
    *("BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "ConvInteger", "MatMulInteger"),
    *("DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "QuantizeLinear"),
    # Steps: the gradient is 0 wherever there is one.
    *("Ceil", "Floor", "Hardmax", "Round", "Sign"),
    # Shapes and positions.
    *("ArgMax", "ArgMin", "NonMaxSuppression", "NonZero", "Shape", "Size"),
    # Constants and sequences of numbers.
    *("BlackmanWindow", "Constant", "ConstantOfShape", "EyeLike", "HammingWindow", "HannWindow"),
    *("MelWeightMatrix",),
    # Random numbers.
    *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    # Strings and data that are no tensors.
    *("ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit"),
    *("OptionalHasElement", "SequenceEmpty", "SequenceLength", "TfIdfVectorizer"),
)
