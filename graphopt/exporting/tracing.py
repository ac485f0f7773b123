"""Trace a PyTorch module so that its graph shows where gradients stop, and refuse what no graph can show."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from graphopt.errors import GraphoptError, some

_NORMALIZATIONS = (nn.modules.batchnorm._BatchNorm,)
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_GRADIENTS = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}
_HOOKS = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}
_DROPOUTS = {
    *(nn.functional.dropout1d, nn.functional.dropout2d, nn.functional.dropout3d),
    *(nn.functional.alpha_dropout, nn.functional.feature_alpha_dropout),
}
Example = tuple[tuple[object, ...], dict[str, object]]  # positional and keyword arguments of forward

# Autograd functions of PyTorch's own control flow.
_OF_TORCH = ("torch._higher_order_ops.", "torch._functorch.", "torch.nn.parallel.")


def refuse(what: str, instead: str) -> GraphoptError:
    """Return the error for a module whose training no file can record."""
    return GraphoptError(f"export: cannot record {what}: {instead}")


class _Stops(TorchFunctionMode):
    """Detach what is computed while gradients are disabled, and refuse gradients of the module's own."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is torch._C._set_grad_enabled:
            with torch._C.DisableTorchFunction():  # otherwise, torch.export would cut the graph here
                return func(*args, **kwargs)
        if func == _DATA:
            return args[0].detach()
        if func in _GRADIENTS:
            raise refuse("gradients that forward computes", "compute them in the loss, or train in PyTorch")
        if func in _HOOKS:
            raise refuse("a gradient's hook", "remove it, or write the change of the gradient as a function")
        if func is nn.functional.embedding:
            _check_embedding(*args, **kwargs)
        if func in _DROPOUTS and inspect.signature(func).bind(*args, **kwargs).arguments.get("training", True):
            raise refuse(f"{func.__name__} in training", "call eval() of the module that calls it, or use Dropout")
        name = getattr(func, "__name__", "")
        if not torch.is_grad_enabled():
            if name.endswith("_") and not name.startswith("__") and _requires_grad(args[:1]):
                raise refuse(f"{name} without a gradient in place", f"write x = x.{name[:-1]}(...)")
            return _detached(func(*args, **kwargs))
        return func(*args, **kwargs)


def _check_embedding(
    indices: object,
    weight: object,
    padding_idx: object = None,
    max_norm: object = None,
    norm_type: object = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> None:
    option = "max_norm" if max_norm is not None else "scale_grad_by_freq" if scale_grad_by_freq else ""
    if option:
        raise refuse(f"{option} of an embedding, which changes its update", f"leave {option} out")


def _requires_grad(args: Sequence[object]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)


def _detached(result: Any) -> Any:
    """Detach the floating-point tensors of a result."""
    if isinstance(result, torch.Tensor):
        return result.detach() if result.is_floating_point() else result
    if type(result) in (list, tuple):
        return type(result)(map(_detached, result))
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*map(_detached, result))
    return result


def check_functions(module: nn.Module, example: Example) -> None:
    """Raise an error about an autograd function between the parameters and the outputs: no file has its gradient.

    Functions are found in the graph that PyTorch's autograd records: a module may call them by any name.
    """
    with torch.enable_grad():
        outputs = pytree.tree_leaves(predicted(module, example))
    waiting = [x.grad_fn for x in outputs if isinstance(x, torch.Tensor) and x.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        function = getattr(node, "_forward_cls", None)
        if function is not None and not function.__module__.startswith(_OF_TORCH):
            how = "write the gradient with detach(), or the function without a gradient of its own"
            if function.__module__ == "torch.utils.checkpoint":
                how = "pass use_reentrant=False, or disable checkpoints during the export"
            name = function.__qualname__
            raise refuse(f"{name}, a torch.autograd.Function, whose gradient no file contains", how)
        found = {x for x, _ in node.next_functions if x is not None} - seen
        seen |= found
        waiting += found


def check_module(module: nn.Module) -> None:
    """Raise an error about what a module does to gradients or weights without a trace in its graph."""
    for path, part in module.named_modules():
        name = path or type(part).__name__
        hooks = ("_backward_hooks", "_backward_pre_hooks")
        if any(getattr(part, hook, None) for hook in hooks):
            raise refuse(f"the backward hook of {name}", "remove it")
        if isinstance(part, nn.RNNBase) and part.training and part.dropout and part.num_layers > 1:
            raise refuse(f"the dropout between layers of {name}", "set its dropout to 0, or call its eval()")
        tracks = getattr(part, "track_running_stats", False)
        if isinstance(part, nn.modules.instancenorm._InstanceNorm) and part.training and tracks:
            raise refuse(f"{name}, whose running statistics are those of instances", "call its eval()")
    for path, weight in module.named_parameters():
        if getattr(weight, "_backward_hooks", None) or getattr(weight, "_post_accumulate_grad_hooks", None):
            raise refuse(f"the gradient's hook of parameter {path}", "remove it")
        if weight.device.type == "meta":
            raise GraphoptError(f"export: parameter {path}: expected numbers, found a tensor on 'meta'")


def initialize(module: nn.Module, example: Example) -> None:
    """Run a module that has lazy parts or weights which a hook computes, so that all its parameters exist."""
    if any(nn.parameter.is_lazy(p) for p in [*module.parameters(), *module.buffers()]):
        args, kwargs = example
        with torch.no_grad(), in_inference_form(module):
            module(*args, **kwargs)


def in_training(module: nn.Module) -> dict[str, nn.Module]:
    """Return the BatchNormalizations that use batch statistics in training, by all their paths."""
    parts = module.named_modules(remove_duplicate=False)
    return {path: x for path, x in parts if isinstance(x, _NORMALIZATIONS) and x.training}


@contextlib.contextmanager
def in_inference_form(module: nn.Module) -> Iterator[None]:
    """Make BatchNormalizations with running statistics normalize by these, in a `with` block."""
    parts = [x for x in in_training(module).values() if x.running_mean is not None]
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part in parts:
            part.training = True


@contextlib.contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Restore the attributes that forward and its hooks set, such as the weights of weight_norm."""
    before = {part: dict(part.__dict__) for part in module.modules()}
    try:
        yield
    finally:
        for part, attributes in before.items():
            part.__dict__.clear()
            part.__dict__.update(attributes)


@contextlib.contextmanager
def traced(module: nn.Module) -> Iterator[None]:
    """Make a module's forward record where gradients stop, in a `with` block.

    Raises:
        GraphoptError: forward changes parameters or buffers, or does what no graph shows.
    """
    versions = {path: x._version for path, x in state_of_module(module).items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_attributes_kept(module))
        stack.enter_context(in_inference_form(module))
        if not isinstance(module, torch.jit.ScriptModule):
            stack.enter_context(_forward_replaced(module))
        elif "prim::Enter" in str(module.inlined_graph):
            raise refuse("torch.no_grad() in a scripted module", "export the module before torch.jit.script")
        yield
    if changed := [path for path, x in state_of_module(module).items() if x._version != versions.get(path)]:
        raise changing(changed)


def changing(paths: Sequence[str]) -> GraphoptError:
    """Return the error for a forward that changes parameters or buffers."""
    return refuse(f"that forward changes {some(paths)}", "change parameters and buffers outside forward")


@contextlib.contextmanager
def _forward_replaced(module: nn.Module) -> Iterator[None]:
    own, forward = module.__dict__.get("forward"), module.forward

    @functools.wraps(forward)
    def marked(*args: object, **kwargs: object) -> object:
        before = state_of_module(module)
        with _Stops():
            result = forward(*args, **kwargs)
        after = state_of_module(module)
        if changed := [path for path in {**before, **after} if before.get(path) is not after.get(path)]:
            raise changing(changed)
        return result

    module.forward = marked
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def state_of_module(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by all their paths."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def predicted(module: nn.Module, example: Example) -> object:
    """Return what a module predicts in the form that its file has, in which dropout keeps all elements."""
    args, kwargs = example
    attention = nn.functional.scaled_dot_product_attention

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        *rest: Any,
        **more: Any,
    ) -> torch.Tensor:
        return attention(q, k, v, attn_mask, 0.0, *rest, **more)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_attributes_kept(module))
        stack.enter_context(in_inference_form(module))
        stack.enter_context(mock.patch.object(nn.functional, "dropout", lambda input, *_, **__: input))
        stack.enter_context(mock.patch.object(nn.functional, "scaled_dot_product_attention", attend))
        return module(*args, **kwargs)


def trained_paths(module: nn.Module, paths: Sequence[str], example: Example) -> list[str]:
    """Return the paths of the parameters that a gradient reaches from the module's outputs."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    asked = [path for path in paths if parameters[path].requires_grad]
    outputs = pytree.tree_leaves(predicted(module, example))
    ends = [y.sum() for y in outputs if isinstance(y, torch.Tensor) and y.requires_grad and not y.is_complex()]
    if not ends or not asked:
        return []
    gradients = torch.autograd.grad(ends, [parameters[path] for path in asked], allow_unused=True)
    return [path for path, gradient in zip(asked, gradients, strict=True) if gradient is not None]
