"""Quantize weights and activations: simulated while a model trains, or stored in a frozen base."""

from passes.quantization.fake_quantize import FakeQuantize as FakeQuantize
from passes.quantization.fold import FoldBatchNormalization as FoldBatchNormalization
from passes.quantization.quantize_weights import QuantizeWeights as QuantizeWeights

__all__ = ["FakeQuantize", "FoldBatchNormalization", "QuantizeWeights"]
