"""Emit onnxscript operators into a model's graph, and infer their types immediately.

A traced function is a Python function whose arguments are an `Emitter` called `op`, and values. `op.Tanh(x)` emits a
node, and so does arithmetic such as `1 - y * y`. A Python number takes the element type of the other operand.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnxscript import BuilderFeature, OnnxFunction, TapeBuilder

from graphopt.errors import GraphoptError, cause, kind_of, nearest, unknown
from graphopt.graph.arithmetic import Arithmetic
from graphopt.graph.node_inference import infer_outputs
from graphopt.graph.operators import schema_of
from graphopt.graph.traversal import subgraphs
from graphopt.graph.values import dims_of, dtype_of, is_static

Input = ir.Value | None  # of a node: None if it is left out
_OF_BOOLEANS = {"And", "Not", "Or", "Where", "Xor"}


class Emitter(TapeBuilder):
    """Append nodes to the main graph of `model` in a `with` block: `with Emitter(model) as op`."""

    def __init__(self, model: ir.Model) -> None:
        super().__init__(features=BuilderFeature.FULL)
        self._model = model
        self._graph = model.graph
        self.versions = model.opset_imports
        self._constants: dict[tuple[object, ...], ir.Value] = {}
        self._written: dict[tuple[object, ...] | None, ir.Value] = {}  # constants by how Python writes them
        self._depth = 0
        self._taken: set[str | None] = set()

    def within(self, body: ir.Graph) -> Emitter:
        """Return an emitter into `body`, a subgraph of a node in this emitter's graph."""
        inner = type(self)(self._model)
        inner._graph, inner._depth = body, self._depth + 1
        inner._taken = set(ir.convenience.create_value_mapping(body))
        return inner

    @property
    def inputs(self) -> Sequence[ir.Value]:
        """Return the inputs of the model."""
        return self._model.graph.inputs

    def defaults_of(self, node: ir.Node) -> dict[str, object]:
        """Return the attributes of a call of a model's function that have a default, by name."""
        function = self._model.functions.get(node.op_identifier())
        attributes = () if function is None else function.attributes.values()
        return {x.name: x.value for x in attributes if x.value is not None}

    @property
    def graph(self) -> ir.Graph:
        """Return the graph into which it emits."""
        return self._graph

    @property
    def is_in_body(self) -> bool:
        """Return whether it emits into a subgraph of a node."""
        return self._depth > 0

    def value_like(self, x: ir.Value, shape: ir.Shape | None = None) -> ir.Value:
        """Return a new value for a graph input, with the type of `x`, and its shape unless `shape` is given."""
        return self._named(ir.Value(type=x.type, shape=x.shape if shape is None else shape))

    def __enter__(self) -> Emitter:
        self._arithmetic = Arithmetic(self).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._arithmetic.__exit__(*error)

    def _get_schema(self, op_type: str, domain: str, version: int | None) -> onnx.defs.OpSchema | None:
        schema = schema_of(domain, op_type, version or self.versions.get(domain, 0))
        if schema is None and not domain:
            meant = nearest(op_type, {known.name for known in onnx.defs.get_all_schemas()})
            raise GraphoptError(
                f"op.{op_type}: expected an operator of ONNX, opset {self.versions.get('', 0)}, found none of this name"
                f"{f', nearest: {meant!r}' if meant else ''}"
            )
        return schema

    def _partition_inputs_attributes(
        self, schema: onnx.defs.OpSchema | None, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Skip the slow conversion of the schema if the call already separates inputs and attributes."""
        if (
            schema is not None
            and schema.min_input <= len(args) <= schema.max_input
            and kwargs.keys() <= schema.attributes.keys()
        ):
            return args, kwargs
        if schema is not None:
            names = [*schema.attributes, *(x.name for x in schema.inputs)]
            for name in kwargs:
                if name not in names:
                    raise GraphoptError(f"op.{schema.name}: {unknown('argument', name, names)}")
        return super()._partition_inputs_attributes(schema, args, kwargs)

    def _add_node(self, node: ir.Node) -> None:
        node.version = node.version or self.versions.get(node.domain)
        for y in node.outputs if self._depth else ():
            self._named(y)
        self._graph.append(node)

    def _add_initializer(self, value: ir.Value) -> None:
        self._graph.register_initializer(value)

    def _named(self, value: ir.Value) -> ir.Value:
        """Name a value of a body, whose names must differ from those in the surrounding graphs."""
        names = (f"body{self._depth}_{i}" for i in itertools.count(len(self._taken)))
        value.name = value.name or next(name for name in names if name not in self._taken)
        self._taken.add(value.name)
        return value

    def _infer_shapes(self, node: ir.Node) -> None:
        if subgraphs(node):
            return  # the caller sets the types of such a node
        try:
            self._infer(node)
        except Exception as error:
            inputs = ", ".join("-" if x is None else f"{x.name}: {x.type}{x.shape}" for x in node.inputs)
            least = getattr(schema_of(node.domain, node.op_type, node.version or 0), "min_output", 0)
            more = f": write _outputs={least}" if len(node.outputs) < least else ""
            raise GraphoptError(f"cannot emit {node.op_type}({inputs}): {str(error).strip()}{more}") from error

    def infer(self, node: ir.Node) -> None:
        """Infer the types and shapes of an existing node's outputs from its inputs, as far as ONNX does."""
        node.version = node.version or self.versions.get(node.domain)
        self._constant_propagation(node)
        with contextlib.suppress(Exception):
            self._infer(node)

    def _infer(self, node: ir.Node) -> None:
        if all(y.type is not None and is_static(y) for y in node.outputs):
            return  # of a constant
        for y, (kind, shape) in zip(node.outputs, infer_outputs(node, node.version or 0), strict=True):
            if kind is not None:
                y.merge_shapes(shape)
                y.type = kind

    def _cast_inputs(self, schema: onnx.defs.OpSchema | None, inputs: Sequence[Any]) -> Sequence[Input]:
        """Skip the slow search for types if all inputs are values."""
        if all(x is None or type(x) is ir.Value for x in inputs):
            return inputs
        name = f"op.{schema.name}" if schema is not None else "an operator"
        for x in inputs:
            if isinstance(x, bool) and schema is not None and schema.name in _OF_BOOLEANS:
                raise GraphoptError(
                    f"{name}: expected a boolean value, found {x}: `==` and `is` compare identities, and "
                    "op.Equal(a, b) compares numbers"
                )
            if isinstance(x, list | tuple) and any(isinstance(each, ir.Value) for each in x):
                raise GraphoptError(
                    f"{name}: expected values one by one, found {kind_of(x)} of them: write {name}(*values)"
                )
            if not isinstance(x, int | float | np.generic | np.ndarray | list | tuple | None | ir.Value):
                raise GraphoptError(f"{name}: expected a value, a number or an array, found {kind_of(x)}")
        return super()._cast_inputs(schema, inputs)

    def _promote_constant(self, value: npt.ArrayLike, dtype: ir.DataType | None) -> ir.Value:
        numbers = value if isinstance(value, list | tuple) else [value]
        written = (repr(value), dtype) if all(type(x) in (bool, int, float) for x in numbers) else None
        if written in self._written:
            return self._written[written]
        tensor = _tensor(value, dtype)
        key = (tensor.dtype, tuple(tensor.shape.dims), tensor.tobytes())
        if key not in self._constants:
            self._constants[key] = self.call_op("Constant", [], {"value": tensor})  # type: ignore[assignment]
        if written is not None:
            self._written[written] = self._constants[key]
        return self._constants[key]

    def call_op(  # type: ignore[override]
        self, op_type: str, args: Sequence[Any], kwargs: dict[str, Any], /, **options: Any
    ) -> ir.Value | Sequence[ir.Value]:
        """Create a node and return its output or outputs.

        Raises:
            GraphoptError: ONNX has no such operator, or it takes no such inputs or attributes.
        """
        if op_type == "Constant" and args:
            raise GraphoptError(f"op.Constant: expected attributes, found {kind_of(args[0])}: write op.constant(...)")
        for name, attribute in kwargs.items():
            if type(attribute) is ir.Value and not self._takes_input(
                op_type, name, options.get("domain", ""), options.get("version")
            ):
                raise GraphoptError(
                    f"op.{op_type}: {name}: expected a number or a text, since it is an attribute, found value "
                    f"{attribute.name!r}"
                )
            if name == "to" and not isinstance(attribute, int | ir.Attr):
                raise GraphoptError(
                    f"op.{op_type}: to: expected an element type, such as x.dtype or onnx_ir.DataType.FLOAT, found "
                    f"{kind_of(attribute)}"
                )
        try:
            return super().call_op(op_type, args, kwargs, **options)
        except GraphoptError:
            raise
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise GraphoptError(f"cannot emit {op_type}: {cause(error)}") from error

    def _takes_input(self, op_type: str, name: str, domain: str, version: int | None) -> bool:
        schema = schema_of(domain, op_type, version or self.versions.get(domain, 0))
        return schema is not None and any(x.name == name for x in schema.inputs)

    def emit_again(self, node: ir.Node, inputs: Sequence[Input]) -> Sequence[ir.Value]:
        """Emit a node's operator with its attributes on other inputs, and return the outputs."""
        count = len(node.outputs)
        made = self.call_op(node.op_type, inputs, dict(node.attributes), domain=node.domain, outputs=count)
        return [made] if isinstance(made, ir.Value) else made

    @contextlib.contextmanager
    def before(self, node: ir.Node) -> Iterator[None]:
        """Put the nodes that a `with` block emits before another one."""
        count = len(self._graph)
        yield
        emitted = list(self._graph)[count:]
        self._graph.remove(emitted)
        self._graph.insert_before(node, emitted)

    def trace(
        self, function: Callable[..., Any] | OnnxFunction[..., Any], *args: ir.Value, outputs: int | None = 1
    ) -> Any:
        """Emit a traced function `f(op, *args)` or the body of an onnxscript function; return its output or outputs.

        An onnxscript function must have the given number of outputs; None allows any number.
        """
        if not isinstance(function, OnnxFunction):
            return function(self, *args)
        body = function.function_ir
        if len(args) != len(body.inputs) or outputs not in (None, len(body.outputs)) or body.attributes:
            raise GraphoptError(
                f"{function.name}: expected an onnxscript function of {len(args)} inputs, {outputs or 'some'} output "
                f"and no attributes, found {len(body.inputs)}, {len(body.outputs)} and {len(body.attributes)}: "
                f"a traced function has no such limits"
            )
        values: dict[ir.Value | None, ir.Value] = dict(zip(body.inputs, args, strict=True))
        for node in body:
            made = self.emit_again(node, [values.get(x) for x in node.inputs])
            values.update(zip(node.outputs, made, strict=True))
        traced = [values[output] for output in body.outputs]
        return traced[0] if len(traced) == 1 else traced

    def constant(self, value: Any, like: ir.Value | None = None) -> ir.Value:
        """Return a constant from an array or numbers, in the element type of `like` if given."""
        return self._promote_constant(value, None if like is None else like.dtype)

    def cast(self, x: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """Return `x` in an element type; `x` itself if it has it."""
        return x if x.dtype == dtype else self.Cast(x, to=dtype)

    def shape_of(self, x: ir.Value, start: int = 0, end: int | None = None) -> ir.Value:
        """Return the sizes of some axes of `x` (all by default) as an int64 vector, which is constant if they are."""
        sizes = None if x.shape is None else list(x.shape)[start:end]
        if sizes is not None and all(isinstance(size, int) for size in sizes):
            return self.constant(np.array(sizes, np.int64))
        bounds = {"start": start} if start else {}
        return self.Shape(x, **bounds, **({} if end is None else {"end": end}))

    def first(self, x: ir.Value) -> ir.Value:
        """Return the first element of `x` as a vector of float32, which is empty if `x` is.

        The inference of shapes writes a dimension for each element of a long vector that a Slice reads, so that a
        tensor is flattened last.
        """
        axes = range(0 if x.shape is None else len(x.shape))
        corner = self.Slice(x, [0 for _ in axes], [1 for _ in axes], [*axes]) if axes else x
        return self.cast(self.Reshape(corner, [-1]), ir.DataType.FLOAT)

    def count(self, x: ir.Value, axes: Sequence[int] | None = None) -> ir.Value | float:
        """Return the number of elements of `x` along `axes` (all by default), in the element type of `x`.

        If the axes are static, the result is a Python number.
        """
        dims, dtype = dims_of(x), dtype_of(x)
        axes = range(len(dims)) if axes is None else [axis % len(dims) for axis in axes]
        unknown = [axis for axis in axes if not isinstance(dims[axis], int)]
        if unknown and len(axes) == len(dims):
            return self.Cast(self.Size(x), to=dtype)
        static = math.prod((dim for axis in axes if isinstance(dim := dims[axis], int)), start=1.0)
        if not unknown:
            return static
        sizes = [self.Shape(x, start=axis, end=axis + 1) for axis in unknown]
        count = self.Cast(self.Squeeze(functools.reduce(self.Mul, sizes), [0]), to=dtype)
        return count if static == 1 else self.Mul(count, static)


def _tensor(value: npt.ArrayLike, dtype: ir.DataType | None) -> ir.TensorProtocol:
    """Return a constant in an element type.

    Raises:
        GraphoptError: the type holds another number, as integers do for 0.5.
    """
    kind = np.asarray(value).dtype.kind
    if kind not in "biufV" and not (kind in "SU" and dtype is not None and dtype.is_string()):
        raise GraphoptError(f"op.constant: expected an array or numbers, found {kind_of(value)}")
    if dtype is not None and not dtype.is_floating_point() and not dtype.is_string():
        numbers = np.asarray(value)
        if numbers.dtype.kind == "f" and not np.array_equal(numbers, np.trunc(numbers)):
            raise GraphoptError(
                f"a number beside a value of {dtype}: expected integers, found {numbers.tolist()}, which would be cut: "
                "write op.Cast(value, to=...) first"
            )
    if isinstance(value, (np.ndarray, np.generic)) and dtype is not None:
        value = value.astype(dtype.numpy())
    return ir.tensor(value, dtype=dtype)
