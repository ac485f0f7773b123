"""A picture of a linear regression beside its training graph, and the same as text.

Run it: python examples/plot_graphs.py; it writes pictures/training_graph.svg beside it.
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
        "svg": graphopt.plot(model, step, titles=titles),  # a file with path=: .svg, .png, .pdf, .dot, .mmd
        "dot": graphopt.dot(model, step, titles=titles),
        "mermaid": graphopt.mermaid(model, step, titles=titles),
    }


if __name__ == "__main__":
    path = Path(__file__).parent / "pictures" / "training_graph.svg"
    path.write_text(main()["svg"])
    print(path)
