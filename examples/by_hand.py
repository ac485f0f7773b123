"""Write a training loop by hand, with separate ONNX graphs for forward pass, loss, backward pass, penalty and update.

The losses equal those of the single training graph that graphopt.compile makes of the same parts.

Run it: python examples/by_hand.py
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from sklearn.datasets import load_diabetes
from sklearn.preprocessing import scale

import graphopt
import graphopt.models
import passes

RATE, MOMENTUM, L1, L2 = 0.02, 0.9, 1e-3, 1e-2


class Graph:
    """Run a small ONNX graph: take arrays by name and return the outputs by name."""

    def __init__(self, model: ir.Model | onnx.ModelProto) -> None:
        proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
        self.session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        self.names = [output.name for output in self.session.get_outputs()]

    def __call__(self, **arrays: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(self.names, self.session.run(None, arrays), strict=True))


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')


def square_loss() -> Graph:
    """Return the mean of (y - target)^2 and its gradient with respect to y."""
    loss = parsed(
        """loss (float[N,1] y, float[N,1] target) => (float loss) {
            error = Sub(y, target)
            square = Mul(error, error)
            loss = ReduceMean<keepdims=0>(square)
        }"""
    )
    return Graph(graphopt.grad(loss, ["y"]))


def elastic_penalty(shape: tuple[int, ...]) -> Graph:
    """Return l1 sum |w| + l2 sum w^2 of a parameter, and its gradient."""
    penalty = parsed(
        f"""penalty (float[{",".join(map(str, shape))}] w) => (float penalty)
        <float l1 = {{{L1}}}, float l2 = {{{L2}}}> {{
            absolute = ReduceL1<keepdims=0>(w)
            square = ReduceSumSquare<keepdims=0>(w)
            first = Mul(l1, absolute)
            second = Mul(l2, square)
            penalty = Add(first, second)
        }}"""
    )
    return Graph(graphopt.grad(penalty, ["w"]))


def nesterov(shape: tuple[int, ...]) -> Graph:
    """Return a parameter's next value and velocity: v' = momentum v + g; w' = w - rate (g + momentum v')."""
    kind = f"float[{','.join(map(str, shape))}]"
    return Graph(
        parsed(
            f"""nesterov ({kind} w, {kind} v, {kind} g, float rate, float momentum) => ({kind} w2, {kind} v2) {{
                kept = Mul(momentum, v)
                v2 = Add(kept, g)
                ahead = Mul(momentum, v2)
                direction = Add(g, ahead)
                change = Mul(rate, direction)
                w2 = Sub(w, change)
            }}"""
        )
    )


def main() -> dict[str, list[float]]:
    x, target = load_diabetes(return_X_y=True)
    x, target = scale(x).astype(np.float32), scale(target).astype(np.float32)[:, None]
    model = graphopt.models.mlp((10,), 1, hidden=[16])
    batches = np.array_split(np.random.default_rng(0).permutation(len(x)), 8) * 5

    layer = graphopt.ForwardBackward(model)
    parameters = layer.parameters
    velocity = {name: np.zeros_like(w) for name, w in parameters.items()}
    loss = square_loss()
    penalty = {name: elastic_penalty(w.shape) for name, w in parameters.items()}
    update = {name: nesterov(w.shape) for name, w in parameters.items()}
    rate, momentum = np.array(RATE, np.float32), np.array(MOMENTUM, np.float32)
    by_hand = []
    for rows in batches:
        forward = layer.forward(x[rows])
        compared = loss(y=forward["y"], target=target[rows])
        gradients = forward.backward(compared["loss.grad.y"])
        total = compared["loss"]
        for name, w in parameters.items():
            cost = penalty[name](w=w)
            total = total + cost["penalty"]
            g = gradients[name] + cost["penalty.grad.w"]
            after = update[name](w=w, v=velocity[name], g=g, rate=rate, momentum=momentum)
            parameters[name], velocity[name] = after["w2"], after["v2"]
        layer.set_parameters(parameters)
        by_hand.append(float(total))

    step = graphopt.compile(
        model,
        loss=passes.MeanSquaredError(),
        regularizer=passes.ElasticPenalty(L1, L2),
        optimizer=passes.SGD(RATE, momentum=MOMENTUM, nesterov=True),
    )
    executor = graphopt.Executor(step)
    fused = [executor.step(x=x[rows], target=target[rows])["loss"] for rows in batches]

    print(f"by hand, on the engine {layer.engine!r}: loss {by_hand[0]:.6f} -> {by_hand[-1]:.6f}")
    print(f"one fused graph: loss {fused[0]:.6f} -> {fused[-1]:.6f}")
    print(f"largest difference: {np.abs(np.subtract(by_hand, fused)).max():.2g}")
    return {"by hand": by_hand, "fused": fused}


if __name__ == "__main__":
    main()
