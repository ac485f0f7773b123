"""Operators without gradient: they compare, count, choose, round or draw; no small change shows. Or it is refused."""

from graphopt.graph.operators import DRAWING, PREDICATES
from passes.gradients.registry import no_gradient, refused

no_gradient(
    # Comparison and logic.
    *PREDICATES,
    # Integers.
    *("BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"),
    # Steps: the gradient is 0 wherever there is one.
    *("Ceil", "Floor", "Hardmax", "Round", "Sign"),
    # Shapes and positions.
    *("ArgMax", "ArgMin", "NonMaxSuppression", "NonZero", "Shape", "Size"),
    # Constants and sequences of numbers.
    *("BlackmanWindow", "Constant", "ConstantOfShape", "EyeLike", "HammingWindow", "HannWindow"),
    *("MelWeightMatrix",),
    # Random numbers.
    *DRAWING,
    # Strings and data that are no tensors.
    *("ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit"),
    *("OptionalHasElement", "SequenceEmpty", "SequenceLength", "TfIdfVectorizer"),
)

refused(
    "it computes with integers: quantize after training, or with QuantizeLinear and DequantizeLinear around floats",
    *("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"),
)
refused(
    "it holds sequences of tensors, which have no gradient here: use Concat, Split, Gather or Scan",
    *(
        "ConcatFromSequence",
        "SequenceAt",
        "SequenceConstruct",
        "SequenceErase",
        "SequenceInsert",
        "SequenceMap",
    ),
    *("SplitToSequence",),
)
refused("it holds an optional, which may be empty: pass the tensor itself", "Optional")
refused("it reinterprets the bits of a number, which has no derivative", "BitCast")
