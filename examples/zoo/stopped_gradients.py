"""Define PyTorch modules that stop or replace gradients by detach(), and return their own loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from in_torch import BOTH, TorchCase
from in_torch import warm_up as warm_up
from torch import nn
from torch.nn import functional
from torch_own import pairs, rows, words

import passes


def straight_through(hard: torch.Tensor, soft: torch.Tensor) -> torch.Tensor:
    """Return `hard` with the gradient of `soft` (Bengio et al. 2013)."""
    return soft + (hard - soft).detach()


def perceptron(*sizes: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    parts: list[nn.Module] = []
    for i in range(len(sizes) - 1):
        parts += [nn.Linear(sizes[i], sizes[i + 1]), activation()]
    return nn.Sequential(*parts[:-1])


class SimSiam(nn.Module):
    """Predict one view's representation from the other's, which is detached (Chen, He 2021)."""

    def __init__(self, normalized: bool) -> None:
        super().__init__()
        middle = [nn.BatchNorm1d(10)] if normalized else []
        self.encode = nn.Sequential(nn.Linear(6, 10), *middle, nn.ReLU(), nn.Linear(10, 5))
        self.predict = perceptron(5, 4, 5)

    def forward(self, a, b):
        one, two = self.encode(a), self.encode(b)
        likeness = functional.cosine_similarity(self.predict(one), two.detach())
        return -(likeness + functional.cosine_similarity(self.predict(two), one.detach())).mean() / 2


class Byol(nn.Module):
    """Predict the representation of a frozen target network (Grill et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predict = perceptron(6, 10, 5), perceptron(5, 4, 5)
        self.target = perceptron(6, 10, 5).requires_grad_(False)

    def forward(self, a, b):
        prediction = functional.normalize(self.predict(self.online(a)), dim=-1)
        return (prediction - functional.normalize(self.target(b), dim=-1).detach()).pow(2).sum(-1).mean()


class Dino(nn.Module):
    """Distil the detached output of the network itself, centred by a buffer (Caron et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.network = perceptron(6, 10, 5, activation=nn.GELU)
        self.register_buffer("center", torch.randn(1, 5) / 5)

    def forward(self, a, b):
        teacher = ((self.network(b) - self.center) / 0.4).softmax(-1).detach()
        return -(teacher * (self.network(a) / 0.8).log_softmax(-1)).sum(-1).mean()


class Moco(nn.Module):
    """Contrast queries with detached keys and a queue in a buffer (He et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = perceptron(6, 10, 5)
        self.register_buffer("queue", functional.normalize(torch.randn(5, 7), dim=0))

    def forward(self, a, b):
        q, k = (functional.normalize(self.encode(x), dim=-1) for x in (a, b))
        positive = (q * k.detach()).sum(-1, keepdim=True)
        return torch.cat([positive, q @ self.queue], 1) / 0.5


class Vae(nn.Module):
    """Maximize the evidence lower bound; noise is an input (Kingma, Welling 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = perceptron(6, 10, 6), perceptron(3, 10, 6)

    def forward(self, x, noise):
        mean, log_variance = self.encode(x).chunk(2, -1)
        z = mean + noise * (log_variance / 2).exp()
        divergence = (log_variance.exp() + mean**2 - 1 - log_variance).sum(-1) / 2
        return ((self.decode(z) - x).pow(2).sum(-1) + divergence).mean()


class VqVae(nn.Module):
    """Quantize by the nearest vector of a codebook, straight through (van den Oord et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = perceptron(6, 10, 4), perceptron(4, 10, 6)
        self.codebook = nn.Embedding(7, 4)

    def forward(self, x):
        z = self.encode(x)
        nearest = (z[:, None] - self.codebook.weight).pow(2).sum(-1).argmin(-1)
        q = self.codebook(nearest)
        losses = (q - z.detach()).pow(2).mean() + 0.25 * (z - q.detach()).pow(2).mean()
        return (self.decode(straight_through(q, z)) - x).pow(2).mean() + losses


class ScalarQuantization(nn.Module):
    """Round bounded numbers, straight through (Mentzer et al. 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = perceptron(6, 10, 3), perceptron(3, 10, 6)

    def forward(self, x):
        z = 2.5 * torch.tanh(self.encode(x))
        return self.decode(straight_through(z.round(), z))


class GumbelSoftmax(nn.Module):
    """Choose a category, straight through; noise is an input (Jang et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.decode = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x, noise):
        soft = ((self.score(x) + noise) / 0.7).softmax(-1)
        hard = functional.one_hot(soft.argmax(-1), 5).to(soft.dtype)
        return self.decode(straight_through(hard, soft))


class BinaryWeights(nn.Module):
    """Use the signs of weights, straight through (Courbariaux et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        weight = straight_through(self.first.weight.sign(), self.first.weight)
        return self.last(torch.tanh(functional.linear(x, weight, self.first.bias)))


class BinaryActivations(nn.Module):
    """Use the signs of activations, straight through within [-1, 1] (Hubara et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.first(x)
        return self.last(straight_through(h.sign(), h.clamp(-1, 1)))


class Capsules(nn.Module):
    """Route by agreement of detached predictions (Sabour et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.transform = nn.Linear(8, 12), nn.Parameter(torch.randn(4, 3, 3, 5) / 2)

    def squash(self, x):
        square = x.pow(2).sum(-1, keepdim=True)
        return x * square / (1 + square) / (square + 1e-6).sqrt()

    def forward(self, x):
        u = self.squash(self.enter(x).view(-1, 4, 3))
        votes = torch.einsum("bid,ijde->bije", u, self.transform)
        fixed, logits = votes.detach(), x.new_zeros(x.shape[0], 4, 3)
        for _ in range(2):
            v = self.squash((logits.softmax(-1)[..., None] * fixed).sum(1))
            logits = logits + (fixed * v[:, None]).sum(-1)
        return self.squash((logits.softmax(-1)[..., None] * votes).sum(1)).pow(2).sum(-1)


class Spike(torch.autograd.Function):
    """Step in the forward pass, with the derivative of a fast sigmoid in the backward pass."""

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        return gradient / (1 + 5 * x.abs()) ** 2


def surrogate(x: torch.Tensor) -> torch.Tensor:
    return straight_through((x > 0).to(x.dtype), torch.sigmoid(4 * x))


class Spiking(nn.Module):
    """Unroll leaky neurons that integrate, fire and are reset by detached spikes (Neftci et al. 2019)."""

    def __init__(self, spike: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.enter, self.leave, self.spike = nn.Linear(5, 8), nn.Linear(8, 3), spike
        self.leak = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        v, total = x.new_zeros(x.shape[0], 8), 0
        for t in range(x.shape[1]):
            v = torch.sigmoid(self.leak) * v + self.enter(x[:, t])
            s = self.spike(v - 0.5)
            v = v - 0.5 * s.detach()
            total = total + self.leave(s)
        return total


class QLearning(nn.Module):
    """Move the value of an action towards a detached estimate of the same network (Mnih et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.network = perceptron(6, 10, 4)

    def forward(self, state, after, action, reward):
        value = self.network(state).gather(1, action)[:, 0]
        target = reward[:, 0] + 0.9 * self.network(after).amax(1).detach()
        return (value - target).pow(2).mean()


class ActorCritic(nn.Module):
    """Weight log-probabilities by detached advantages (Mnih et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(6, 10), nn.Linear(10, 4), nn.Linear(10, 1)

    def forward(self, state, action, reward):
        h = torch.tanh(self.body(state))
        advantage = reward - self.critic(h)
        chosen = self.actor(h).log_softmax(-1).gather(1, action)
        return (advantage.pow(2) / 2 - chosen * advantage.detach()).mean()


class Truncated(nn.Module):
    """Truncate backpropagation through time after two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 8)
        for t in range(4):
            h = self.cell(x[:, t], h.detach() if t == 2 else h)
        return self.head(h)


class GradientReversal(nn.Module):
    """Reverse the gradients of a domain's classifier (Ganin et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.label, self.domain = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x):
        h = torch.tanh(self.features(x))
        reversed_ = (1.5 * h).detach() - 0.5 * h
        return torch.cat([self.label(h), self.domain(reversed_)], -1)


class StoppedWeight(nn.Module):
    """Detach a weight in its second use, so that only the first trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(11, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.middle(self.embedding(x))) @ self.embedding.weight.detach().t()


class FocalLoss(nn.Module):
    """Weight each row's loss by its detached probability (Lin et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.network = perceptron(6, 10, 4)

    def forward(self, x, label):
        logs = self.network(x).log_softmax(-1).gather(1, label)
        return -((1 - logs.exp().detach()) ** 2 * logs).mean()


def transitions(batch: int):
    states = torch.randn(batch, 6), torch.randn(batch, 6)
    return *states, torch.randint(0, 4, (batch, 1)), torch.randn(batch, 1)


def actions(batch: int):
    return torch.randn(batch, 6), torch.randint(0, 4, (batch, 1)), torch.randn(batch, 1)


def labelled(batch: int):
    return torch.randn(batch, 6), torch.randint(0, 4, (batch, 1))


def stopped(build: Callable[[], nn.Module], inputs: Callable[..., Any], **options: Any) -> TorchCase:
    """Return a case whose detach() TorchScript's exporter drops."""
    return TorchCase(build, inputs, **{"ways": BOTH, "unrecorded": ("torchscript",), **options})


OWN: dict[str, Any] = {"loss": passes.OwnLoss()}
CLASSES: dict[str, Any] = {"loss": passes.CrossEntropy()}
TOKENS: dict[str, Any] = {"loss": passes.CrossEntropy(axis=-1)}

CASES = {
    "SimSiam": stopped(lambda: SimSiam(False), pairs(6, 6), **OWN),
    "SimSiam, BatchNormalization": stopped(lambda: SimSiam(True), pairs(6, 6), batch=8, **OWN),
    "BYOL": stopped(Byol, pairs(6, 6), freeze="target.*", **OWN),
    "DINO": stopped(Dino, pairs(6, 6), **OWN),
    "MoCo": stopped(Moco, pairs(6, 6), **CLASSES),
    "VAE": TorchCase(Vae, pairs(6, 3), ways=BOTH, **OWN),
    "VQ-VAE": stopped(VqVae, rows(6), **OWN),
    "scalar quantization": stopped(ScalarQuantization, rows(6)),
    "Gumbel-softmax": stopped(GumbelSoftmax, pairs(6, 5)),
    "binary weights": stopped(BinaryWeights, rows(6)),
    "binary activations": stopped(BinaryActivations, rows(6)),
    "capsules": stopped(Capsules, rows(8)),
    "spikes, straight through": stopped(lambda: Spiking(surrogate), rows(4, 5)),
    "spikes, autograd.Function": stopped(lambda: Spiking(Spike.apply), rows(4, 5)),
    "Q-learning": stopped(QLearning, transitions, **OWN),
    "actor and critic": stopped(ActorCritic, actions, **OWN),
    "truncated backpropagation": stopped(Truncated, rows(4, 5)),
    "gradient reversal": stopped(GradientReversal, rows(6)),
    "a weight detached in its second use": stopped(StoppedWeight, words(6), **TOKENS),
    "focal loss": stopped(FocalLoss, labelled, **OWN),
}  # fmt: skip
