"""Train a linear regression step by step: build a model by hand, add a loss, train it and compare it with scikit-learn.

Run it: python examples/linear_regression.py
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from sklearn.datasets import make_regression
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import train_test_split

import graphopt
import passes


def linear_model(features: int) -> onnx.ModelProto:
    """Return y = x coefficients + intercept, both zero, in ONNX's text form."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21]>
        linear (float[N, {features}] x) => (float[N, 1] y) {{
            product = MatMul(x, coefficients)
            y = Add(product, intercept)
        }}""")
    for name, shape in (("coefficients", (features, 1)), ("intercept", (1,))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name))
    return model


def main() -> dict[str, float]:
    x, y = make_regression(n_features=2, bias=2, random_state=0)
    x, y = x.astype(np.float32), y.astype(np.float32)
    x_train, x_test, y_train, y_test = train_test_split(x, y, random_state=0)
    expected = LinearRegression().fit(x_train, y_train)

    model = linear_model(2)
    step = graphopt.compile(model, loss=passes.MeanSquaredError(), optimizer=passes.SGD(learning_rate=0.05))
    print(graphopt.listing(step))

    executor = graphopt.Executor(step)
    random = np.random.default_rng(0)
    for epoch in range(60):
        order = random.permutation(len(x_train))
        for rows in np.array_split(order, 8):
            loss = executor.step(x=x_train[rows], target=y_train[rows, None])["loss"]
        if epoch % 10 == 0:
            print(f"epoch {epoch:2d}  loss {loss:.6g}")

    state = executor.state
    print("coefficients", state["coefficients"].ravel(), "scikit-learn's", expected.coef_)
    print("intercept   ", state["intercept"], "scikit-learn's", expected.intercept_)

    before = ReferenceEvaluator(model).run(None, {"x": x_test})[0]
    after = ReferenceEvaluator(executor.trained()).run(None, {"x": x_test})[0]
    for name, prediction in (("before", before), ("after", after)):
        print(f"mean squared error on held-out data {name}: {np.mean((prediction[:, 0] - y_test) ** 2):.6g}")
    return {
        "coefficients": float(np.abs(state["coefficients"].ravel() - expected.coef_).max()),
        "intercept": float(np.abs(state["intercept"][0] - expected.intercept_)),
        "before": float(np.mean((before[:, 0] - y_test) ** 2)),
        "after": float(np.mean((after[:, 0] - y_test) ** 2)),
    }


if __name__ == "__main__":
    main()
