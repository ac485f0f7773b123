"""Draw a linear regression beside its training graph, as a picture and as text.

Run it: python examples/plot_graphs.py. It writes pictures/training_graph.svg.
"""

from __future__ import annotations

from pathlib import Path

import graphopt
import graphopt.models
import passes


def main() -> dict[str, str]:
    model = graphopt.models.linear((2,), 1)
    step = graphopt.compile(model, loss=passes.MeanSquaredError(), optimizer=passes.SGD(learning_rate=0.05))
    titles = ["a linear regression", "its training graph"]
    return {
        "svg": graphopt.plot(model, step, titles=titles),  # path= writes a file: .svg, .png, .pdf, .dot, .mmd
        "dot": graphopt.dot(model, step, titles=titles),
        "mermaid": graphopt.mermaid(model, step, titles=titles),
    }


if __name__ == "__main__":
    path = Path(__file__).parent / "pictures" / "training_graph.svg"
    path.write_text(main()["svg"])
    print(path)
