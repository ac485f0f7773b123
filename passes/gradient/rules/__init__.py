"""The rules, a file a family; importing this package registers them all."""

from passes.gradient.rules import constant as constant
from passes.gradient.rules import control_flow as control_flow
from passes.gradient.rules import convolution as convolution
from passes.gradient.rules import elementwise as elementwise
from passes.gradient.rules import indexing as indexing
from passes.gradient.rules import linear as linear
from passes.gradient.rules import normalization as normalization
from passes.gradient.rules import pooling as pooling
from passes.gradient.rules import quantization as quantization
from passes.gradient.rules import recurrent as recurrent
from passes.gradient.rules import reduction as reduction
from passes.gradient.rules import resampling as resampling
from passes.gradient.rules import sampling as sampling
from passes.gradient.rules import shape as shape
from passes.gradient.rules import softmax as softmax
from passes.gradient.rules import spectral as spectral
