"""Rewrite the exported files of a few modules by other tools before they train."""

from __future__ import annotations

from dataclasses import replace

import control_flow_models
import in_torch
import stopped_gradients
import structured_models
import torch_own
from in_torch import warm_up as warm_up

WAYS = tuple(f"{way}, {tool}" for way in in_torch.EXPORTERS for tool in in_torch.TOOLS)
FAMILIES = torch_own, stopped_gradients, structured_models, control_flow_models
NAMES = (
    "cnn",
    "resnet",
    "translation, LSTM",
    "GPT, tied head",
    "tied autoencoder",
    "fresh layer norms",
    "gated, RMSNorm, tied",
    "vision transformer",
    "MADE",
    "VQ-VAE",
    "GAT",
    "siamese, BatchNormalization",
    "DETR",
    "partly tied head",
)

# No tool keeps what the exporter notes at nodes: where detach() is, and which weights it or the tool merged.
CASES = {
    name: replace(family.CASES[name], ways=WAYS, roads=False, unrecorded=tuple(in_torch.TOOLS))
    for name in NAMES
    for family in FAMILIES
    if name in family.CASES
}
