"""Change the rows that train at random: move, mirror and colour images, and mix rows with their targets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import state
from graphopt.graph.emitter import Emitter
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.metadata import MIXED, Flag
from graphopt.graph.operators import CONVOLUTIONS, ELEMENTWISE_OPERATORS, POOLS
from graphopt.graph.randomness import uniform
from graphopt.graph.rewriting import Pass
from graphopt.graph.roles import Role, data_inputs, with_role
from graphopt.graph.values import dims_of, is_floating, like, rank, redirect
from graphopt.intervals import within

# Random numbers apart from those of Dropouts: of images, one of each kind for a row, and of mixtures.
_OF_IMAGES, _OF_MIXTURES, _OF_WARPS = 2**31, 2**31 + 1, 2**31 + 2
_KINDS = ("horizontal_flip", "vertical_flip", "down", "right", "brightness", "contrast", "saturation")
_KINDS_OF_WARPS = ("rotation", "area", "ratio", "top", "left", "hue")
_WIDEST = 4 / 3  # the largest ratio of the sides of a resized crop
_GRAY = (0.2989, 0.587, 0.114)  # of red, green and blue: ITU-R BT.601, as torchvision rounds it
_LAYOUTS = {"NCHW": (1, 2, 3), "NHWC": (3, 1, 2)}  # the axes of channels, height and width
_OF_CHANNELS = CONVOLUTIONS | POOLS | {"BatchNormalization", "InstanceNormalization"}  # along axis 1
_KEEPS_AXES = ELEMENTWISE_OPERATORS | {"Pad", "Resize", "Slice"}
_QUANTILES = 1024
_END = 2**31 - 1

AUGMENTED = Flag("graphopt.augmented")  # a node that computes what training reads in place of an input


@dataclass(frozen=True)
class AugmentImages(Pass):
    """Move, mirror and colour the images that train at random, each row anew in each step.

    Evaluation, prediction and the trained model take images as they are. An image is rotated, cropped, moved, mirrored
    and coloured, in this order, before the model standardizes it. Formulas are those of torchvision's RandomRotation,
    RandomResizedCrop, RandomCrop with `padding_mode="reflect"`, RandomHorizontalFlip, RandomVerticalFlip and
    ColorJitter, which also draws the order of brightness, contrast, saturation and hue. A rotation and a resized crop
    are one bilinear interpolation together. Random numbers come from the step counter (see `TrainingMode`): they are
    the same on every runtime, and stay the same when training resumes. Passes with the same seed change their inputs
    alike.

    Args:
        horizontal_flip: the probability with which left and right change places.
        vertical_flip: the probability with which top and bottom change places.
        crop: the largest move, as a share of the height and of the width, in whole pixels. Beyond its edges, an image
            is reflected.
        brightness: each image is multiplied by a number from 1 - brightness to 1 + brightness.
        contrast: the distances to the mean gray of the image are multiplied by such a number.
        saturation: the distances to the gray of each pixel are multiplied by such a number. It needs 3 channels.
        hue: the hue of each image moves by up to this share of the circle of colours. It needs 3 channels.
        rotation: the largest angle, in degrees, to either side. Beyond its edges, an image is reflected.
        resized_crop: the least share of the area that is cut out and resized to the whole image, with sides of a ratio
            from 3:4 to 4:3. 1 cuts nothing out.
        mixup: the `alpha` of `MixUp`, which then follows; 0 leaves rows apart.
        value_range: the values of black and white, such as [0, 1] or [0, 255]. Brightness, contrast, saturation and hue
            need them, and leave no value outside.
        layout: the axes, NCHW or NHWC. By default, those that the model's convolutions read.
        input: the name of the input, if the model has several with four axes.
        seed: the seed of the random numbers.

    Raises:
        GraphoptError: the model has no such input, nothing tells the layout, colours lack a range or channels, or a
            rotation or a resized crop is to change whole numbers.

    >>> augment = passes.AugmentImages(brightness=0.2, value_range=(0, 1))
    >>> step = graphopt.compile(models.cnn((3, 8, 8), 4), augment=augment, loss=passes.CrossEntropy())
    """

    horizontal_flip: float = within("[0, 1]", 0.5)
    vertical_flip: float = within("[0, 1]", 0.0)
    crop: float = within("[0, 0.5]", 0.125)
    brightness: float = within("[0, 1]", 0.0)
    contrast: float = within("[0, 1]", 0.0)
    saturation: float = within("[0, 1]", 0.0)
    hue: float = within("[0, 0.5]", 0.0)
    rotation: float = within("[0, 180]", 0.0)
    resized_crop: float = within("(0, 1]", 1.0)
    mixup: float = within("[0, 8]", 0.0)
    value_range: tuple[float, ...] | None = within("(-inf, inf)", None)
    layout: Literal["NCHW", "NHWC"] | None = None
    input: str | None = None
    seed: int = within("[0, inf)", 0)
    changes_forward = True

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = self.value_range
        if bounds is not None and (len(bounds) != 2 or bounds[0] >= bounds[1]):
            raise GraphoptError(
                f"AugmentImages(value_range=...): expected the values of black and white, such as (0, 1), found "
                f"{bounds}"
            )
        if bounds is None and self._colours:
            raise GraphoptError(
                f"AugmentImages({self._colours[0]}): expected the values of black and white in value_range, such as "
                "(0, 1) or (0, 255), found none"
            )

    @property
    def _colours(self) -> list[str]:
        return [name for name in ("brightness", "contrast", "saturation", "hue") if getattr(self, name)]

    @property
    def _warps(self) -> list[str]:
        return ["rotation"] * (self.rotation > 0) + ["resized_crop"] * (self.resized_crop < 1)

    def rewrite(self, model: ir.Model) -> None:
        x = self._images(model)
        layout, images = self._layout(x), trained_on(x)
        uses = list(images.uses())
        with Emitter(model) as op:
            fractions = _fractions(model, op, images, self.seed, _OF_IMAGES, len(_KINDS))
            drawn = {kind: op.Gather(fractions, [i], axis=1) for i, kind in enumerate(_KINDS)}
            if self._warps or self.hue:
                more = _fractions(model, op, images, self.seed, _OF_WARPS, len(_KINDS_OF_WARPS))
                drawn |= {kind: op.Gather(more, [i], axis=1) for i, kind in enumerate(_KINDS_OF_WARPS)}
            changed = self._moved(op, drawn, images, layout)
            if self._colours:
                changed = self._coloured(op, drawn, changed, layout)
            if changed is not images:
                kept = op.Where(op.constant(np.array(True)), changed, images)  # inference takes the images
                redirect(uses, _augmented(kept, images, same_as=2))
        if self.mixup:
            MixUp(self.mixup, self.seed).rewrite(model)

    def _images(self, model: ir.Model) -> ir.Value:
        inputs = _data(model)
        found = [x for x in inputs if x.shape is not None and rank(x) == 4 and self.input in (None, x.name)]
        if len(found) != 1:
            raise GraphoptError(
                f"AugmentImages(input={self.input!r}): expected the name of one input of images with four axes, the "
                f"model has {', '.join(map(_described, inputs)) or 'none'}"
            )
        (x,) = found
        if (real := self._colours + self._warps) and not is_floating(x):
            raise GraphoptError(
                f"AugmentImages({real[0]}): expected images of floating-point numbers, found {_described(x)}"
            )
        return x

    def _layout(self, x: ir.Value) -> str:
        """Return the layout of an input, which the model's operators show or the option gives."""
        axes = _axes_of_channels(x)
        shown = [layout for layout, (axis, *_) in _LAYOUTS.items() if axes == {axis}]
        if self.layout is None and not shown:
            raise GraphoptError(
                f"AugmentImages: expected a model whose convolutions show which axis of {x.name!r} has the channels, "
                "found none: set layout to NCHW or NHWC"
            )
        if self.layout is not None and axes and shown != [self.layout]:
            raise GraphoptError(
                f"AugmentImages(layout={self.layout!r}): expected the layout that the model reads, found that it takes "
                f"axis {min(axes)} of {x.name!r} for the channels: leave layout out"
            )
        return self.layout or shown[0]

    def _moved(self, op: Emitter, drawn: dict[str, ir.Value], x: ir.Value, layout: str) -> ir.Value:
        """Emit images whose pixels come from other places, the same in all channels."""
        if not (self.crop or self.horizontal_flip or self.vertical_flip or self._warps):
            return x
        channels, *plane = _LAYOUTS[layout]
        height, width = (_size(op, x, axis) for axis in plane)
        down = self._places(op, height, self.vertical_flip, drawn["vertical_flip"], drawn["down"])
        right = self._places(op, width, self.horizontal_flip, drawn["horizontal_flip"], drawn["right"])
        # Pixels are numbered through all images. In NHWC, those of all channels move together.
        planes = op.shape_of(x, 0, 2 if channels == 1 else 1)
        count = op.Cast(op.ReduceProd(planes, keepdims=0), to=ir.DataType.INT32)
        start = op.Reshape(op.Range(0, count, 1) * (height * width), op.Concat(planes, [1, 1], axis=0))
        start.shape = ir.Shape([*dims_of(x)[: 2 if channels == 1 else 1], 1, 1])
        across, along = ([1, 3], [1, 2]) if channels == 1 else ([2], [1])
        table = op.constant([-1]) if channels == 1 else op.Concat([-1], op.shape_of(x, 3), axis=0)
        if not self._warps:
            down, right = op.Unsqueeze(down * width, across), op.Unsqueeze(right, along)
            return like(op.Gather(op.Reshape(x, table), start + down + right), x)
        warp = {name: op.Unsqueeze(drawn[name], along) for name in _KINDS_OF_WARPS}
        down, right = op.Unsqueeze(down, across), op.Unsqueeze(right, along)
        down, right = self._warped(op, warp, down, right, height, width)
        (top, bottom, lower), (left, other, later) = (
            _neighbours(op, place, size) for place, size in ((down, height), (right, width))
        )
        if channels == 3:  # a pixel of all channels has one place
            lower, later = op.Unsqueeze(lower, [3]), op.Unsqueeze(later, [3])
        pixels = op.Reshape(x, table)
        upper, below = (
            _between(op.Gather(pixels, line + left), op.Gather(pixels, line + other), later)
            for line in (start + top * width, start + bottom * width)
        )
        return like(_between(upper, below, lower), x)

    def _warped(
        self,
        op: Emitter,
        drawn: dict[str, ir.Value],
        down: ir.Value,
        right: ir.Value,
        rows: ir.Value | int,
        columns: ir.Value | int,
    ) -> tuple[ir.Value, ir.Value]:
        """Emit where the pixels come from in an image that is rotated and of which a part is resized, as fractions."""
        down, right = (op.Cast(x, to=ir.DataType.FLOAT) for x in (down, right))
        height, width = (float(x) if isinstance(x, int) else op.Cast(x, to=ir.DataType.FLOAT) for x in (rows, columns))
        if self.resized_crop < 1:
            area = drawn["area"] * (1.0 - self.resized_crop) + self.resized_crop
            # Of the width to the height
            ratio = op.Exp(drawn["ratio"] * (2 * math.log(_WIDEST)) - math.log(_WIDEST))
            down, right = (
                _part(op, place, size, op.Sqrt(area * shape), drawn[name])
                for place, size, shape, name in (
                    (down, height, op.Reciprocal(ratio) * width / height, "top"),
                    (right, width, ratio * height / width, "left"),
                )
            )
        if self.rotation:
            angle = drawn["rotation"] * (2 * math.radians(self.rotation)) - math.radians(self.rotation)
            sine, cosine = op.Sin(angle), op.Cos(angle)
            y, z = down - (height - 1.0) / 2.0, right - (width - 1.0) / 2.0
            down = sine * z + cosine * y + (height - 1.0) / 2.0
            right = cosine * z - sine * y + (width - 1.0) / 2.0
        return down, right

    def _places(
        self, op: Emitter, size: int | ir.Value, flip: float, mirrored: ir.Value, shifted: ir.Value
    ) -> ir.Value:
        """Emit where the pixels along an axis come from, int32 [rows or 1, size]."""
        if isinstance(size, int):
            place, last, most = (
                op.constant(np.arange(size, dtype=np.float32)[None]),
                size - 1.0,
                round(self.crop * size),
            )
        else:
            length = op.Cast(size, to=ir.DataType.FLOAT)
            place, last, most = (
                op.Unsqueeze(op.Range(0.0, length, 1.0), [0]),
                length - 1.0,
                op.Round(self.crop * length),
            )
        if flip:
            place = op.Where(op.Less(mirrored, flip), last - place, place)
        if self.crop:
            steps = op.Min(op.Floor(shifted * (2.0 * most + 1.0)), 2.0 * most) - most
            place = last - op.Abs(last - op.Abs(place + steps))  # reflected beyond the first and the last
        return op.Cast(place, to=ir.DataType.INT32)

    def _coloured(self, op: Emitter, drawn: dict[str, ir.Value], x: ir.Value, layout: str) -> ir.Value:
        """Emit images of other colours: mixtures with black, with their mean gray, and with the gray of each pixel."""
        assert self.value_range is not None
        black, white = self.value_range
        axis = _LAYOUTS[layout][0]
        count = dims_of(x)[axis]
        needs_all = self.saturation or self.hue
        if count not in ((3,) if needs_all else (1, 3)):
            raise GraphoptError(
                f"AugmentImages({self._colours[-1]}): expected {'3' if needs_all else '1 or 3'} channels, found "
                f"{count} in {_described(x)}"
            )
        shape = [3 if i == axis else 1 for i in range(4)]
        weights = op.constant(np.array(_GRAY).reshape(shape).tolist(), like=x)

        def gray(x: ir.Value) -> ir.Value:
            return op.ReduceSum(x * weights, [axis], keepdims=1) if count == 3 else x

        pixels = x - black if black else x
        for name in self._colours:
            if name == "hue":
                turn = op.Unsqueeze(12.0 * self.hue * drawn[name] - 6.0 * self.hue, [2, 3])
                pixels = _turned(op, pixels, axis, op.cast(turn, x.dtype))
                continue
            ratio = 2.0 * getattr(self, name) * drawn[name] + (1.0 - getattr(self, name))
            factor = op.cast(op.Unsqueeze(ratio, [2, 3]), x.dtype)
            other = None if name == "brightness" else gray(pixels)
            if name == "contrast":
                other = op.ReduceMean(other, [1, 2, 3], keepdims=1)
            pixels = factor * pixels if other is None else other + factor * (pixels - other)
            pixels = op.Clip(pixels, 0.0, white - black)
        return pixels + black if black else pixels


@dataclass(frozen=True)
class MixUp(Pass):
    """Mix each row that trains with a share of the row before it, and its loss in the same way.

    x becomes (1 - s) x + s x', for the row x' before it in the batch (the last one for the first) and a share s that
    follows the distribution Beta(alpha, alpha), anew for each row in each step. A loss of classes becomes
    (1 - s) loss(t) + s loss(t'), which for cross-entropy is the loss of the mixed probabilities. Other targets, which
    are numbers, become (1 - s) t + s t'. Weights of classes and of rows count with the same shares. Pairs are random if
    batches are shuffled, as in torchvision's MixUp. Each of several workers mixes its own rows. Evaluation, prediction
    and the trained model mix nothing. Random numbers come from the step counter (see `TrainingMode`) and stay the same
    when training resumes.

    Args:
        alpha: the parameter of the distribution. 1 makes all shares equally likely; with less, most are near 0 or 1.
        seed: the seed of the shares.

    Raises:
        GraphoptError: the model has inputs of other numbers, such as tokens, its rows are already mixed, or it has a
            loss; the loss that follows compares no targets row by row.

    Source: Zhang, Cisse, Dauphin, Lopez-Paz, "mixup: Beyond Empirical Risk Minimization", 2018.

    >>> steps = {"augment": passes.MixUp(alpha=0.4), "loss": passes.CrossEntropy(), "optimizer": passes.SGD(0.1)}
    >>> executor = graphopt.Executor(graphopt.compile(models.mlp((4,), 3), **steps))
    """

    alpha: float = within("(0, 8]", 0.2)
    seed: int = within("[0, inf)", 0)
    changes_forward = True

    def rewrite(self, model: ir.Model) -> None:
        if with_role(model, Role.LOSS) or share_of_others(model) is not None:
            raise GraphoptError(
                "MixUp: expected a model without a loss whose rows are apart: run it once, before the loss"
            )
        inputs = _data(model)
        if not inputs or (wrong := [x for x in inputs if not (is_floating(x) and x.shape)]):
            raise GraphoptError(
                "MixUp: expected inputs of floating-point numbers with rows, found "
                f"{_described(wrong[0]) if inputs else 'none'}: leave it out"
            )
        reading = {trained_on(x): list(trained_on(x).uses()) for x in inputs}
        with Emitter(model) as op:
            drawn = op.Squeeze(_fractions(model, op, inputs[0], self.seed, _OF_MIXTURES, 1), [1])
            share = MIXED.mark(_beta(op, drawn, self.alpha))
            for x, uses in reading.items():
                mixture = mixed(op, x, before(op, x), share)
                AUGMENTED.mark(mixture)
                redirect(uses, mixture)


def share_of_others(model: ir.Model) -> ir.Value | None:
    """Return the share of the row before in each row, [rows], or None if rows are apart."""
    return next((node.outputs[0] for node in model.graph if MIXED.is_set(node)), None)


def before(op: Emitter, x: ir.Value) -> ir.Value:
    """Emit the row before each row: the last for the first."""
    return like(op.Concat(op.Slice(x, [-1], [_END], [0]), op.Slice(x, [0], [-1], [0]), axis=0), x)


def mixed(op: Emitter, own: ir.Value, other: ir.Value, share: ir.Value) -> ir.Value:
    """Emit rows with a share of others; inference takes the rows."""
    share = op.cast(share, own.dtype)
    axes = [*range(1, rank(own))]
    share = op.Unsqueeze(share, axes) if axes else share
    return InferenceForm(same_as=0).write(like(op.Add(own, share * (other - own)), own))


def trained_on(x: ir.Value) -> ir.Value:
    """Return what training reads in place of an input."""
    changed = [node.outputs[0] for node in x.consumers() if AUGMENTED.is_set(node)]
    return trained_on(changed[0]) if changed else x


def _data(model: ir.Model) -> list[ir.Value]:
    """Return the inputs that a batch feeds and something reads."""
    return [x for x in data_inputs(model) if x.uses()]


def _described(x: ir.Value) -> str:
    return f"{x.name!r} of type {x.dtype} and shape {x.shape}"


def _axes_of_channels(x: ir.Value) -> set[int]:
    """Return the axes of an input of images that operators take for the channels."""
    found, seen = set[int](), set[ir.Value]()
    todo: list[tuple[ir.Value, tuple[int, ...]]] = [(x, (0, 1, 2, 3))]
    while todo:
        value, axes = todo.pop()
        seen.add(value)
        for node, index in value.uses():
            y = node.outputs[0]
            if node.domain or y in seen:
                continue
            if node.op_type in _OF_CHANNELS and index == 0:
                found.add(axes[1])
            elif node.op_type == "Transpose":
                todo.append((y, tuple(axes[i] for i in node.attributes.get_ints("perm", [3, 2, 1, 0]))))
            elif node.op_type in _KEEPS_AXES and y.shape is not None and rank(y) == 4:
                todo.append((y, axes))
    return found


def _augmented(y: ir.Value, x: ir.Value, same_as: int) -> ir.Value:
    """Mark what training reads in place of a value, which is an input of its node."""
    return InferenceForm(same_as=same_as).write(AUGMENTED.mark(like(y, x)))


def _size(op: Emitter, x: ir.Value, axis: int) -> int | ir.Value:
    """Return the size of an axis as a number, or as an int32 scalar if only a batch tells it."""
    size = dims_of(x)[axis]
    if isinstance(size, int):
        return size
    return op.Cast(op.Squeeze(op.shape_of(x, axis, axis + 1), [0]), to=ir.DataType.INT32)


def _fractions(model: ir.Model, op: Emitter, x: ir.Value, seed: int, number: int, count: int) -> ir.Value:
    """Emit random numbers from 0 to 1 for each row, [rows, count]."""
    rows = op.Concat(op.shape_of(x, 0, 1), [count], axis=0)
    drawn = uniform(op, rows, state.counter(model), seed, number)
    drawn.shape = ir.Shape([dims_of(x)[0], count])
    return 2.0**-32 * op.Cast(drawn, to=ir.DataType.FLOAT) + 0.5


def _part(op: Emitter, place: ir.Value, size: ir.Value | float, share: ir.Value, start: ir.Value) -> ir.Value:
    """Emit the places along an axis of a part of a size, which is resized to the whole axis.

    As torchvision's RandomResizedCrop, the part and its start are whole pixels.
    """
    part = op.Max(op.Min(op.Round(share * size), size), 1.0)
    first = op.Min(op.Floor(start * (size - part + 1.0)), size - part)
    return first + op.Max(op.Min((place + 0.5) * (part / size) - 0.5, part - 1.0), 0.0)


def _neighbours(op: Emitter, place: ir.Value, size: int | ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Emit the pixels on both sides of places along an axis, and how far a place is from the first one.

    Places beyond the first and the last pixel are reflected there.
    """
    last = (
        op.Cast(size, to=ir.DataType.FLOAT) - 1.0 if isinstance(size, ir.Value) else op.constant(np.float32(size - 1))
    )
    period = op.Max(2.0 * last, 1.0)
    place = op.Abs(place)
    place = place - period * op.Floor(place / period)
    place = op.Max(op.Min(last - op.Abs(last - place), last), 0.0)
    first = op.Floor(place)
    second = op.Min(first + 1.0, last)
    return op.Cast(first, to=ir.DataType.INT32), op.Cast(second, to=ir.DataType.INT32), place - first


def _between(first: ir.Value, second: ir.Value, share: ir.Value) -> ir.Value:
    return first + share * (second - first)


def _turned(op: Emitter, pixels: ir.Value, axis: int, turn: ir.Value) -> ir.Value:
    """Emit colours whose hue is turned, in sixths of the circle: those of HSV, as in torchvision's `adjust_hue`."""
    red, green, blue = op.Split(pixels, num_outputs=3, axis=axis, _outputs=3)
    value, least = op.ReduceMax(pixels, [axis], keepdims=1), op.ReduceMin(pixels, [axis], keepdims=1)
    chroma = value - least
    width = op.Where(chroma > 0.0, chroma, op.cast(op.constant(np.float32(1)), pixels.dtype))
    hue = op.Where(
        op.Equal(value, red),
        (green - blue) / width,
        op.Where(op.Equal(value, green), (blue - red) / width + 2.0, (red - green) / width + 4.0),
    )
    shape = [3 if i == axis else 1 for i in range(4)]
    place = hue + turn + op.constant(np.array([5.0, 3.0, 1.0]).reshape(shape).tolist(), like=pixels) + 6.0
    place = place - 6.0 * op.Floor(place / 6.0)
    share = op.Max(op.Min(op.Min(place, 4.0 - place), 1.0), 0.0)
    return value - chroma * share


def _beta(op: Emitter, uniform: ir.Value, alpha: float) -> ir.Value:
    """Emit numbers of the distribution Beta(alpha, alpha) from uniform ones from 0 to 1, by its quantiles.

    The distance from 1/2 tells the smaller of s and 1 - s, and the side which of them. For v = s^alpha, the density
    s^(alpha - 1) (1 - s)^(alpha - 1) has no pole, and quantiles are nearly on a line.
    """
    v = np.linspace(0, 0.5**alpha, 2**16 + 1)
    density = (1 - v ** (1 / alpha)) ** (alpha - 1)
    below = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    table = np.interp(np.linspace(0, below[-1], _QUANTILES + 1), below, v)
    place = float(_QUANTILES) * (1.0 - op.Abs(2.0 * uniform - 1.0))
    first = op.Min(op.Floor(place), _QUANTILES - 1.0)
    index = op.Cast(first, to=ir.DataType.INT32)
    low, step = (op.Gather(op.constant(x.astype(np.float32)), index) for x in (table[:-1], np.diff(table)))
    small = op.Pow(low + (place - first) * step, 1 / alpha)
    return op.Where(op.Less(uniform, 0.5), small, 1.0 - small)
