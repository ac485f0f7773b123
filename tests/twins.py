"""A network of PyTorch that trains beside an executor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import graphopt


def descended(loss: torch.Tensor, *optimizers: torch.optim.Optimizer) -> float:
    """Take a step of PyTorch's optimizers along the gradient of a loss, and return the loss."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def assert_trains_as(
    executor: graphopt.Executor,
    network: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    compare: Callable[..., Any] = torch.nn.functional.mse_loss,
    rtol: float = 1e-4,
) -> None:
    """Take the steps of an executor in PyTorch, too, and compare the losses before each."""
    for x, target in batches:
        expected = descended(compare(network(x), target), optimizer)
        found = executor.step(x=x.numpy(), target=target.numpy())["loss"]
        assert found == pytest.approx(expected, rel=rtol)
