"""Run PyTorch with its fused optimizers, eagerly or, with variant `compile`, by torch.compile of network and loss.

The cache of torch.compile starts empty, so that its time includes compilation.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict

import numpy as np
import torch
from protocol import LOSS_SCALE, Job, Step, serve
from torch import nn
from torch.nn import functional


def mlp(job: Job) -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i in range(job.depth):
        if i:
            layers[f"relu{i}"] = nn.ReLU()
        layers[f"layer{i}"] = nn.Linear(*job.weights[f"layer{i}.weight"].shape)
    return nn.Sequential(layers)


def cnn(job: Job) -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            conv0=nn.Conv2d(1, 32, 3, padding=1),
            relu0=nn.ReLU(),
            pool0=nn.MaxPool2d(2),
            conv1=nn.Conv2d(32, 64, 3, padding=1),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            hidden=nn.Linear(64 * 7 * 7, 128),
            relu2=nn.ReLU(),
            head=nn.Linear(128, 10),
        )
    )


class Residual(nn.Module):
    def __init__(self, depth: int, channels: int) -> None:
        super().__init__()
        stride = 1 + (depth != channels)
        self.conv1 = nn.Conv2d(depth, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut, self.shortcut_norm = nn.Identity(), nn.Identity()
        if depth != channels:
            self.shortcut = nn.Conv2d(depth, channels, 1, stride, bias=False)
            self.shortcut_norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        return functional.relu(y + self.shortcut_norm(self.shortcut(x)))


class ResNet(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        sizes = ((32, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128))
        self.blocks = nn.Sequential(*(Residual(*size) for size in sizes))
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(functional.relu(self.stem_norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [part.unflatten(2, (8, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2)]
        x = x + self.out(functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        vocabulary, width = job.weights["embedding.weight"].shape
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(job.weights["positions"].shape))
        self.layers = nn.Sequential(*(Layer(width) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(self.embedding(x) + self.positions)).mean(1))


class Lstm(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.lstm = nn.LSTM(job.weights["lstm.W"].shape[2], job.weights["lstm.R"].shape[2], batch_first=True)
        self.head = nn.Linear(*job.weights["head.weight"].shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def network(job: Job) -> nn.Module:
    """Return the network of a job, with its weights."""
    families = {
        "linear": mlp,
        "mlp": mlp,
        "cnn": cnn,
        "resnet": ResNet,
        "transformer": Transformer,
        "lstm": Lstm,
    }
    built = families[job.family](job)
    arrays = dict(job.weights)
    for name, module in built.named_modules():
        if isinstance(module, nn.Linear):
            arrays[f"{name}.weight"] = arrays[f"{name}.weight"].T
    if "lstm.W" in arrays:  # ONNX's gates are i, o, f, c; PyTorch's are i, f, c, o
        w, r, b = (arrays.pop(f"lstm.{part}")[0] for part in "WRB")
        parts = {"weight_ih_l0": w, "weight_hh_l0": r}
        parts["bias_ih_l0"], parts["bias_hh_l0"] = np.split(b, 2)
        for name, array in parts.items():
            i, o, f, c = np.split(array, 4)
            arrays[f"lstm.{name}"] = np.concatenate([i, f, c, o])
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    state = built.state_dict()
    built.load_state_dict(tensors | {name: x for name, x in state.items() if name.endswith("num_batches_tracked")})
    return built.train()


def build(job: Job) -> Step:
    if job.threads:
        torch.set_num_threads(job.threads)
    if job.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"PyTorch {torch.__version__} finds no GPU: install its build for CUDA")
    torch.set_float32_matmul_precision("high" if job.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = job.precision == "tf32"
    if "medium" in job.words:  # on CPUs, this and not torch.set_float32_matmul_precision chooses oneDNN's products
        for kind in (torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv, torch.backends.mkldnn.rnn):
            kind.fp32_precision = "bf16"
    built = network(job).to(job.device)
    lower = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(job.precision)
    scaler = torch.amp.GradScaler(job.device, LOSS_SCALE, enabled=lower is torch.float16)
    kinds = {
        "sgd": lambda weights: torch.optim.SGD(weights, job.rate, fused=True),
        "momentum": lambda weights: torch.optim.SGD(weights, job.rate, momentum=0.9, fused=True),
        "adamw": lambda weights: torch.optim.AdamW(weights, job.rate, fused=True),
    }
    optimizer = kinds[job.optimizer](list(built.parameters()))
    compare = functional.cross_entropy if job.classifies else functional.mse_loss
    batches = [tuple(torch.from_numpy(array).to(job.device) for array in pair) for pair in job.data]

    def cost(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast(job.device, lower or torch.bfloat16, enabled=lower is not None):
            return compare(built(x), target)

    if "compile" in job.words:
        cost = torch.compile(cost)

    def step(i: int) -> float:
        optimizer.zero_grad()
        loss = cost(*batches[i])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return step


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as fresh:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = fresh
        serve(build)
