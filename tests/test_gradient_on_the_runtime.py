"""Gradients against the slopes of what ONNX Runtime itself computes, where it and ONNX's reference part ways."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders import model
from onnx import helper
from steps import session

from graphopt.testing.gradients import distance, gradient_model

FLOAT = onnx.TensorProto.FLOAT


def resize(shape, symbolic, roi=None, scales=None, sizes=None, **attributes):
    """Return a model of one Resize, whose input's dimensions may be symbols."""
    given = {"roi": (roi, np.float32), "scales": (scales, np.float32), "sizes": (sizes, np.int64)}
    initializers = [
        onnx.numpy_helper.from_array(np.array(numbers, dtype), name)
        for name, (numbers, dtype) in given.items()
        if numbers is not None
    ]
    names = [name if numbers is not None else "" for name, (numbers, _) in given.items()]
    node = helper.make_node("Resize", ["x", *names], ["y"], **attributes)
    dims = [f"d{i}" for i in range(len(shape))] if symbolic else shape
    x = helper.make_tensor_value_info("x", FLOAT, dims)
    graph = helper.make_graph([node], "g", [x], [onnx.ValueInfoProto(name="y")], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def error(proto: onnx.ModelProto, shape: tuple[int, ...]) -> float:
    """Return the largest error of a gradient of a linear operator, whose slopes are its values at unit vectors."""
    forward = session(proto)
    units = np.eye(np.prod(shape), dtype=np.float32).reshape(-1, *shape)
    offset = forward.run(None, {"x": np.zeros(shape, np.float32)})[0]
    slopes = np.stack([forward.run(None, {"x": unit})[0] - offset for unit in units])
    seed = np.random.default_rng(0).standard_normal(offset.shape).astype(np.float32)
    backward = session(ir.to_proto(gradient_model(proto)))
    feeds = {"y.seed": seed, "x": np.ones(shape, np.float32)}
    taken = {x.name: feeds[x.name] for x in backward.get_inputs()}
    expected = np.tensordot(slopes, seed, seed.ndim).reshape(shape)
    return float(np.abs(backward.run(None, taken)[0] - expected).max() / np.abs(expected).max())


SCALES = (1.3, 1.1, 1.0, 2.0, 0.8, 0.35)  # 3 and 4 times the first two are no more than 3 and 4
MODES = [
    *(("nearest", {"nearest_mode": m}) for m in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")),
    ("linear", {}),
    ("linear", {"antialias": 1}),
    ("cubic", {}),
    ("cubic", {"exclude_outside": 1, "cubic_coeff_a": -0.5}),
]
TRANSFORMATIONS = ["half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"]
FEW = [((1.3, 2.0), 0), ((1.3, 1.3), 0), ((0.35, 1.1), 1), ((1.3, 1.1), 0)]
ALL = [(pair, symbolic) for pair in itertools.product(SCALES, repeat=2) for symbolic in (0, 1)]


@pytest.mark.parametrize(
    "cases", [pytest.param(FEW, id="few"), pytest.param(ALL, id="all", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.slow
def test_resize_by_scales_that_leave_the_size_of_an_axis(transformation, cases):
    """ONNX Runtime copies what keeps its shape, whatever the scales are, and only then."""
    for mode, attributes in MODES:
        for (first, second), symbolic in cases:
            options = {"mode": mode, "coordinate_transformation_mode": transformation, **attributes}
            proto = resize((1, 1, 3, 4), symbolic, scales=[1, 1, first, second], **options)
            assert error(proto, (1, 1, 3, 4)) < 1e-5, (options, first, second, symbolic)


@pytest.mark.parametrize("roi", [[0.1, 0.2, 0.8, 0.9], [-0.2, 0, 1.3, 1]])
@pytest.mark.slow
def test_resize_of_a_region(roi):
    region = [0, 0, *roi[:2], 1, 1, *roi[2:]]
    for mode, pair in itertools.product(("nearest", "linear", "cubic"), [(1.3, 2.0), (1.0, 1.0), (1.3, 1.1)]):
        sizes = [1, 1, int(3 * pair[0]), int(4 * pair[1])]
        for given in ({"scales": [1, 1, *pair]}, {"sizes": sizes}):
            options = {"mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize", **given}
            assert error(resize((1, 1, 3, 4), 0, region, **options), (1, 1, 3, 4)) < 1e-5, options


def test_grid_sample_outside_of_the_image():
    """The pixels beyond a border are those at it, for cubic weights too."""
    grid = np.random.default_rng(1).uniform(-2.5, 2.5, (1, 3, 4, 2)).astype(np.float32)
    modes, paddings = ("linear", "nearest", "cubic"), ("zeros", "border", "reflection")
    for mode, padding, align in itertools.product(modes, paddings, (0, 1)):
        attributes = {"mode": mode, "padding_mode": padding, "align_corners": align}
        node = helper.make_node("GridSample", ["x", "grid"], ["y"], **attributes)
        x = helper.make_tensor_value_info("x", FLOAT, (1, 2, 5, 4))
        initializers = [onnx.numpy_helper.from_array(grid, "grid")]
        graph = helper.make_graph([node], "g", [x], [onnx.ValueInfoProto(name="y")], initializers)
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        proto = onnx.shape_inference.infer_shapes(proto)
        assert error(proto, (1, 2, 5, 4)) < 1e-5, attributes


X, W = (2, 4, 9), (4, 2, 3)
CONVOLUTIONS = [
    ("Conv", "N,C,L", "K,M,3", X, W, "group=2"),
    ("Conv", "N,C,L", "K,M,3", X, W, "group=2, strides=[2], pads=[1,0]"),
    ("Conv", "N,C,L", "K,M,3", X, W, "group=2, strides=[2], dilations=[2], pads=[1,1]"),
    ("Conv", "N,C,L", "K,M,T", X, W, "group=2, kernel_shape=[3]"),
    ("ConvTranspose", "N,4,L", "4,M,3", X, W, "group=2, strides=[2]"),
    ("ConvTranspose", "N,C,L", "C,M,T", X, W, "group=2, kernel_shape=[3]"),
    *(
        ("ConvTranspose", "2,4,9", "4,2,3", X, W, f"strides=[{stride}], output_shape=[{size}]{more}")
        for stride, size in [(1, 7), (1, 2), (2, 5), (2, 8), (2, 19)]
        for more in ("", ', auto_pad="SAME_UPPER"', ', auto_pad="SAME_LOWER"')
    ),
]


@pytest.mark.parametrize(
    ("op_type", "x_dims", "w_dims", "x", "w", "attributes"),
    CONVOLUTIONS,
    ids=lambda v: str(v).replace(" ", ""),
)
def test_convolutions_of_unknown_channels_and_of_small_outputs(op_type, x_dims, w_dims, x, w, attributes):
    text = f"g (float[{x_dims}] x, float[{w_dims}] w) => (float[A,B,D] y) {{ y = {op_type}<{attributes}>(x, w) }}"
    proto, random = model(text), np.random.default_rng(3)
    point = {name: random.standard_normal(shape).astype(np.float32) for name, shape in (("x", x), ("w", w))}
    forward, backward = session(proto), session(ir.to_proto(gradient_model(proto)))
    seed = random.standard_normal(forward.run(None, point)[0].shape).astype(np.float32)
    names = [y.name for y in backward.get_outputs()]
    found = dict(zip(names, backward.run(None, point | {"y.seed": seed}), strict=True))
    for name, at in point.items():  # linear in each
        units = np.eye(at.size, dtype=np.float32).reshape(-1, *at.shape)
        expected = [np.vdot(forward.run(None, point | {name: unit})[0], seed) for unit in units]
        assert distance(found[f"{name}.grad"], np.reshape(expected, at.shape)) < 1e-5, name


@pytest.mark.parametrize(
    "expression",
    [
        *(f"LpPool<p={p}, kernel_shape=[2], strides=[2]>(x)" for p in (1, 2, 3)),
        *(f"GlobalLpPool<p={p}>(x)" for p in (1, 2, 3)),
        *(f"LpNormalization<p={p}, axis=2>(x)" for p in (1, 2)),
        "ReduceL1(x)",
        "ReduceL2(x)",
    ],
)
def test_norms_have_a_gradient_of_0_where_all_is_0(expression):
    proto = model(f"g (float[1,1,4] x) => (float[A,B,C] y) {{ y = {expression} }}")
    x = np.zeros((1, 1, 4), np.float32)
    shape = session(proto).run(None, {"x": x})[0].shape
    backward = session(ir.to_proto(gradient_model(proto)))
    (found,) = backward.run(None, {"x": x, "y.seed": np.ones(shape, np.float32)})
    assert np.isfinite(found).all()
    if "Normalization" not in expression:
        np.testing.assert_array_equal(found, x)
