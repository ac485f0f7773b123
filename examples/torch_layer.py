"""Use an ONNX model as a layer of a PyTorch program, trained by a PyTorch optimizer.

Nothing is copied: DLPack shares tensors, and the parameters of the ONNX model share the memory of PyTorch's parameters.
The losses equal those of the same network in PyTorch only, and of a single training graph.

Run it: python examples/torch_layer.py
"""

from __future__ import annotations

import copy
import io
from typing import Any

import onnx
import torch
from torch import nn

import graphopt
import passes


class OnnxFunction(torch.autograd.Function):
    """Run the forward and backward passes of a layer."""

    @staticmethod
    def forward(
        ctx: Any, layer: OnnxLayer, onnx_layer: graphopt.ForwardBackward, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        given = [tensor.detach().contiguous() for tensor in tensors[: len(layer.inputs)]]
        ctx.layer, ctx.passed = layer, onnx_layer.forward(*given)
        outputs = [torch.from_dlpack(ctx.passed.on_device[name]) for name in layer.outputs]
        ctx.mark_non_differentiable(*[y for y in outputs if not y.is_floating_point()])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *seeds: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        named = zip(ctx.layer.outputs, seeds, strict=True)
        found = ctx.passed.backward({name: dy.contiguous() for name, dy in named if dy is not None}).on_device
        wanted = zip([*ctx.layer.inputs, *ctx.layer.names], ctx.needs_input_grad[2:], strict=True)
        return (
            None,
            None,
            *(torch.from_dlpack(found[name]) if name in found and need else None for name, need in wanted),
        )


class OnnxLayer(nn.Module):
    """Wrap an ONNX model with any inputs and outputs. Its parameters are PyTorch parameters, in alphabetical order.

    Pass inputs in the model's order or by name. The result is a tensor, or a tuple for a model with several outputs.
    Integer inputs and outputs have no gradients. Running statistics and Dropout follow `train()` and `eval()`. In the
    mode of `eval()`, the first call that needs gradients compiles the inference form; `torch.no_grad()` avoids it.
    """

    def __init__(self, model: onnx.ModelProto, **steps: Any) -> None:
        super().__init__()
        # The backward pass of the engine `agent` may overwrite the outputs.
        self.onnx = graphopt.ForwardBackward(model, engine="graphs", **steps)
        self.steps = steps
        self.inference: graphopt.ForwardBackward | None = None
        self.inputs, self.outputs = list(self.onnx.inputs), list(self.onnx.outputs)
        self.names = list(self.onnx.parameters)
        self.weights = nn.ParameterList(map(torch.from_numpy, self.onnx.parameters.values()))
        self.onnx.set_parameters([weight.detach() for weight in self.weights])  # shares memory from now on

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        given = dict(zip(self.inputs, inputs, strict=False)) | named
        if len(inputs) + len(named) != len(self.inputs) or set(given) != set(self.inputs):
            raise TypeError(f"expected the inputs {', '.join(self.inputs)}, each once, found {', '.join(given)}")
        tensors = [given[name] for name in self.inputs]
        needs_gradients = any(tensor.requires_grad for tensor in [*tensors, *self.weights])
        if self.training:
            outputs = OnnxFunction.apply(self, self.onnx, *tensors, *self.weights)
        elif torch.is_grad_enabled() and needs_gradients:
            outputs = OnnxFunction.apply(self, self.inference_form(), *tensors, *self.weights)
        else:
            passed = self.onnx.forward(*(tensor.detach().contiguous() for tensor in tensors), training=False)
            outputs = tuple(torch.from_dlpack(passed.on_device[name]) for name in self.outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def train(self, mode: bool = True) -> OnnxLayer:
        self.inference = None  # training changes the running statistics
        return super().train(mode)

    def inference_form(self) -> graphopt.ForwardBackward:
        """Return the model with a backward pass, its running statistics and its parameters, and without Dropout."""
        if self.inference is None:
            steps = {**self.steps, "training": None}
            form = graphopt.ForwardBackward(self.onnx.trained(), engine="graphs", **steps)
            if list(form.parameters) != self.names:  # the trained model has adapters merged, for example
                raise RuntimeError(
                    f"backward in eval(): expected the parameters {', '.join(self.names)}, found "
                    f"{', '.join(form.parameters)}: call train(), or torch.no_grad() if no gradients are needed"
                )
            form.set_parameters([weight.detach() for weight in self.weights])
            self.inference = form
        return self.inference


class Block(nn.Module):
    """Compute x + down(tanh(up(norm(x)))) in PyTorch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def onnx_block(block: Block, width: int) -> onnx.ModelProto:
    """Return the same block as an ONNX model, with the same weights."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        block (float[N,{width}] x) => (float[N,{width}] y) {{
            n = LayerNormalization("x", "norm.weight", "norm.bias")
            u = Gemm<transB=1>(n, "up.weight", "up.bias")
            a = Tanh(u)
            d = Gemm<transB=1>(a, "down.weight", "down.bias")
            y = Add(x, d)
        }}"""
    )
    for name, weight in block.state_dict().items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight.numpy(), name))
    return model


def losses(network: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> list[float]:
    optimizer = torch.optim.Adam(network.parameters(), 5e-3)
    found = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(network(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def fused_losses(network: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """Return the losses of one training graph that contains the whole network, its loss and its optimizer."""
    file = io.BytesIO()
    torch.onnx.export(network, (x,), file, dynamo=False, opset_version=17, input_names=["x"])
    step = graphopt.compile(
        onnx.load_from_string(file.getvalue()), loss=passes.CrossEntropy(), optimizer=passes.Adam(5e-3)
    )
    executor = graphopt.Executor(step, report=["loss"])
    return [executor.step(x=x.numpy(), target=labels.numpy())["loss"] for _ in range(20)]


def main() -> dict[str, Any]:
    torch.manual_seed(0)
    x, labels = torch.randn(64, 8), torch.randint(0, 3, (64,))
    pytorch = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Block(16), nn.ReLU(), nn.Linear(16, 3))
    mixed = copy.deepcopy(pytorch)
    mixed[2] = OnnxLayer(onnx_block(pytorch[2], 16))

    found = {"one training graph": fused_losses(pytorch, x, labels)}
    found |= {"with ONNX": losses(mixed, x, labels), "PyTorch alone": losses(pytorch, x, labels)}
    for name, series in found.items():
        print(f"{name}: loss {series[0]:.6f} -> {series[-1]:.6f} in {len(series)} steps")
    mixed.eval()
    with torch.no_grad():
        apart = (mixed(x) - pytorch(x)).abs().max().item()
    print(f"largest difference of the trained networks' outputs: {apart:.2g}")
    trained = mixed[2].onnx.trained()  # the block as an ONNX model again
    onnx.checker.check_model(trained, full_check=True)
    return {**found, "apart": apart}


if __name__ == "__main__":
    main()
