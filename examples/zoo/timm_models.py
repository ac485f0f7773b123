"""Define small variants of timm's architectures with random weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import timm
import torch
from comparison import optimizers
from in_torch import EXPORTERS, TorchCase
from in_torch import warm_up as warm_up
from timm.models import convmixer, edgenext, ghostnet, metaformer, mlp_mixer
from torch import nn

import passes


def case(
    build: str | Callable[..., nn.Module],
    rate: float = 0.01,
    ways: Sequence[str] = EXPORTERS,
    **options: Any,
) -> TorchCase:
    """Return an architecture, by its class or its name in timm's registry, with smaller sizes."""
    if isinstance(build, str):
        build = partial(timm.create_model, build, pretrained=False)
    return TorchCase(
        partial(build, num_classes=5, **options),
        lambda batch: (torch.randn(batch, 3, 32, 32),),
        loss=passes.CrossEntropy(),
        optimizers=optimizers(rate),
        ways=ways,
    )


UNFOLDED = (
    "dynamo, dynamic",
    "dynamo unfolded, dynamic",
    "torchscript, static",
    "torchscript unfolded, static",
)
OLDER = ("torchscript, static", "torchscript unfolded, static")  # the newer exporter does not support them
VIT = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 2}
MIXER = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "num_blocks": 1}
POOLFORMER = {"mlp_act": nn.GELU, "mlp_bias": True, "layer_scale_init_values": 0.1, "use_mlp_head": False}

CASES = {
    "vit_tiny": case("vit_tiny_patch16_224", **VIT),
    "deit3_small": case("deit3_small_patch16_224", **VIT),
    "beit_base, relative positions": case("beit_base_patch16_224", ways=OLDER, **VIT),
    "eva02, rotary": case("eva02_tiny_patch14_224", ways=UNFOLDED[:2], **VIT),
    "mlp-mixer": case(mlp_mixer.MlpMixer, **MIXER),
    "resmlp": case(
        mlp_mixer.MlpMixer, mlp_ratio=4, block_layer=mlp_mixer.ResBlock, norm_layer=mlp_mixer.Affine, **MIXER
    ),
    "gmlp": case(
        mlp_mixer.MlpMixer,
        mlp_ratio=6,
        block_layer=mlp_mixer.SpatialGatingBlock,
        mlp_layer=timm.layers.GatedMlp,
        **MIXER,
    ),
    "convmixer": case(convmixer.ConvMixer, rate=1e-3, dim=8, depth=1),
    "poolformer": case(
        metaformer.MetaFormer, depths=(1, 1), dims=(8, 12), norm_layers=timm.layers.GroupNorm1, **POOLFORMER
    ),
    "cait": case("cait_xxs24_224", **VIT),
    "xcit": case("xcit_nano_12_p16_224", rate=1e-3, **VIT),
    "pvt_v2": case("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 8, 8, 8), num_heads=(1, 1, 1, 1)),
    "nf_resnet, standardized weights": case(
        "nf_resnet26",
        ways=UNFOLDED,
        rate=1e-3,
        channels=(8, 8, 8, 8),
        depths=(1, 1, 1, 1),
        stem_chs=8,
    ),
    "convnextv2": case("convnextv2_atto", depths=(1, 1, 1, 1), dims=(8, 8, 8, 8)),
    "ghostnet": case(
        ghostnet.GhostNet,
        rate=1e-3,
        cfgs=[[[3, 16, 16, 0, 1]], [[3, 48, 24, 0.25, 2]]],
        width=0.5,
        drop_rate=0.0,
    ),
    "resnetv2, group norm": case("resnetv2_50", rate=1e-3, layers=(1, 1), channels=(32, 32), stem_chs=32),
    "edgenext, cross-covariance": case(
        edgenext.EdgeNeXt,
        rate=1e-3,
        depths=(1, 1, 1, 2),
        dims=(8, 16, 16, 16),
        global_block_counts=(0, 0, 0, 1),
        heads=(2, 2, 2, 2),
    ),
    "visformer": case(
        "visformer_tiny", rate=1e-3, img_size=32, init_channels=8, embed_dim=16, depth=(1, 1, 1), num_heads=2
    ),
}
