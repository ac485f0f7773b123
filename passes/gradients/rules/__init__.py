"""Define the gradient rules, one file per family, and the operators without one. Importing this package registers them.

Operators without a gradient are piecewise constant, random or not numeric. Others are refused.
"""

from graphopt.graph.operators import DRAWING, PREDICATES, STEP_FUNCTIONS
from passes.gradients.registry import no_gradient, refused
from passes.gradients.rules import blocks as blocks
from passes.gradients.rules import control_flow as control_flow
from passes.gradients.rules import elementwise as elementwise
from passes.gradients.rules import linear as linear
from passes.gradients.rules import recurrent as recurrent
from passes.gradients.rules import reduction as reduction
from passes.gradients.rules import sampling as sampling
from passes.gradients.rules import shape as shape
from passes.gradients.rules import windows as windows

no_gradient(
    # Comparison and logic.
    *PREDICATES,
    # Integers.
    *("BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"),
    *STEP_FUNCTIONS,
    # Shapes and positions.
    *("ArgMax", "ArgMin", "NonMaxSuppression", "NonZero", "Shape", "Size"),
    # Constants and sequences of numbers.
    *("BlackmanWindow", "Constant", "ConstantOfShape", "EyeLike", "HammingWindow", "HannWindow"),
    *("MelWeightMatrix",),
    # Random numbers.
    *DRAWING,
    # Strings and data that are not tensors.
    *("ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit"),
    *("OptionalHasElement", "SequenceEmpty", "SequenceLength", "TfIdfVectorizer"),
)

refused(
    "it computes with integers: quantize after training, or use QuantizeLinear and DequantizeLinear around floats",
    *("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"),
)
refused(
    "it works on sequences of tensors, which have no gradient: use Concat, Split, Gather or Scan",
    *("ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceErase", "SequenceInsert"),
    *("SequenceMap", "SplitToSequence"),
)
refused("it contains an optional, which may be empty: pass the tensor itself", "Optional")
refused("it reinterprets the bits of a number, which has no derivative: use Cast", "BitCast")
