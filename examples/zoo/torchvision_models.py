"""Define small variants of torchvision's architectures with random weights."""

from __future__ import annotations

from functools import partial

import torch
from comparison import optimizers
from in_torch import TorchCase
from in_torch import warm_up as warm_up
from torch import nn
from torchvision import models
from torchvision.models import convnext, efficientnet, mobilenetv3, regnet, segmentation
from torchvision.models.googlenet import BasicConv2d, Inception

import passes


def images(size: int):
    return lambda batch: (torch.randn(batch, 3, size, size),)


def inverted(*setting):
    return mobilenetv3.InvertedResidualConfig(*setting)


def regnet_y() -> nn.Module:
    params = regnet.BlockParams.from_init_params(depth=4, w_0=8, w_a=8.0, w_m=2.0, group_width=4, se_ratio=0.25)
    return regnet.RegNet(params, num_classes=5, stem_width=8)


def mobilenet_v2() -> nn.Module:
    return models.MobileNetV2(5, 0.25, [[1, 16, 1, 1], [3, 24, 2, 2], [3, 32, 1, 2]], dropout=0.0)


def mobilenet_v3() -> nn.Module:
    settings = [
        inverted(8, 3, 8, 8, True, "RE", 2, 1, 1),
        inverted(8, 3, 16, 12, False, "HS", 2, 1, 1),
        inverted(12, 5, 24, 12, True, "HS", 1, 1, 1),
    ]
    return mobilenetv3.MobileNetV3(settings, last_channel=16, num_classes=5, dropout=0.0)


def efficientnet_v2() -> nn.Module:
    settings = [
        efficientnet.FusedMBConvConfig(2, 3, 2, 8, 8, 1),
        efficientnet.MBConvConfig(2, 3, 2, 8, 12, 2),
    ]
    return efficientnet.EfficientNet(settings, dropout=0.0, stochastic_depth_prob=0.0, num_classes=5)


def convnext_small() -> nn.Module:
    settings = [convnext.CNBlockConfig(8, 12, 1), convnext.CNBlockConfig(12, None, 1)]
    return convnext.ConvNeXt(settings, stochastic_depth_prob=0.0, num_classes=5)


def swin(version: int) -> nn.Module:
    block = models.swin_transformer
    options = {} if version == 1 else {"block": block.SwinTransformerBlockV2, "downsample_layer": block.PatchMergingV2}
    return models.SwinTransformer(
        [2, 2], 8, [2, 1], [2, 2], [2, 2], mlp_ratio=2.0, stochastic_depth_prob=0.0, num_classes=5, **options
    )


def vit() -> nn.Module:
    return models.VisionTransformer(16, 8, 1, 2, 16, 24, num_classes=5)


def maxvit() -> nn.Module:
    return models.MaxVit((16, 16), 8, 2, [8, 8], [1, 1], 4, 0.0, num_classes=5)


class Segmentation(nn.Module):
    """Segment images: a fully convolutional head with an interpolation on a ResNet's features."""

    def __init__(self) -> None:
        super().__init__()
        body = models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1])
        self.body = nn.Sequential(body.conv1, body.bn1, body.relu, body.maxpool, body.layer1)
        self.head = segmentation.fcn.FCNHead(64, 3)

    def forward(self, x):
        return nn.functional.interpolate(self.head(self.body(x)), x.shape[-2:], mode="bilinear", align_corners=False)


def shuffled() -> nn.Module:
    return models.ShuffleNetV2([1, 2, 1], [8, 8, 16, 32, 16], num_classes=5)


def dense() -> nn.Module:
    return models.DenseNet(4, (2, 2), 8, bn_size=2, num_classes=5)


def inception() -> nn.Module:
    return nn.Sequential(
        BasicConv2d(3, 8, kernel_size=3), Inception(8, 4, 4, 6, 2, 4, 4), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(18, 5),
    )  # fmt: skip


def residual(block: type[nn.Module], **options) -> nn.Module:
    return models.ResNet(block, [1, 1, 1, 1], num_classes=5, **options)


UNFOLDED = ("dynamo, dynamic", "dynamo unfolded, dynamic", "torchscript, static")
CLASSES = {"loss": passes.CrossEntropy()}
SLOW = {**CLASSES, "optimizers": optimizers(1e-3)}

CASES = {
    "ResNet": TorchCase(partial(residual, models.resnet.BasicBlock), images(64), **SLOW),
    "ResNeXt": TorchCase(
        partial(residual, models.resnet.Bottleneck, groups=4, width_per_group=4), images(64), **SLOW
    ),
    "DenseNet": TorchCase(dense, images(16), **SLOW),
    "SqueezeNet": TorchCase(partial(models.SqueezeNet, "1_1", num_classes=5, dropout=0.0), images(32), **CLASSES),
    "MobileNetV2": TorchCase(mobilenet_v2, images(32), **SLOW),
    "MobileNetV3": TorchCase(mobilenet_v3, images(16), **SLOW),
    "ShuffleNetV2": TorchCase(shuffled, images(64), **SLOW),
    "EfficientNetV2": TorchCase(efficientnet_v2, images(16), **SLOW),
    "RegNet": TorchCase(regnet_y, images(32), **SLOW),
    "Inception block": TorchCase(inception, images(12), **CLASSES),
    "ConvNeXt": TorchCase(convnext_small, images(16), **CLASSES),
    "ViT": TorchCase(vit, images(16), **CLASSES),
    "Swin": TorchCase(partial(swin, 1), images(8), **CLASSES),
    "SwinV2": TorchCase(partial(swin, 2), images(8), ways=UNFOLDED, **CLASSES),
    "MaxViT": TorchCase(maxvit, images(16), **SLOW),
    "FCN": TorchCase(Segmentation, images(16), **SLOW),
}  # fmt: skip
