"""Define the gradient rules, one file per family. Importing this package registers them."""

from passes.gradients.rules import constant as constant
from passes.gradients.rules import control_flow as control_flow
from passes.gradients.rules import convolution as convolution
from passes.gradients.rules import elementwise as elementwise
from passes.gradients.rules import indexing as indexing
from passes.gradients.rules import linear as linear
from passes.gradients.rules import normalization as normalization
from passes.gradients.rules import pooling as pooling
from passes.gradients.rules import quantization as quantization
from passes.gradients.rules import recurrent as recurrent
from passes.gradients.rules import reduction as reduction
from passes.gradients.rules import resampling as resampling
from passes.gradients.rules import sampling as sampling
from passes.gradients.rules import shape as shape
from passes.gradients.rules import softmax as softmax
from passes.gradients.rules import spectral as spectral
