"""Sort initializers by name, for programs that read parameters by position."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.metadata import ORIGINAL_NAME, original_name
from graphopt.graph.rewriting import Pass
from graphopt.graph.roles import Role, role_of
from graphopt.graph.values import name_of


@dataclass(frozen=True)
class SortInitializers(Pass):
    """Sort initializers, and the parameter inputs made from them, alphabetically.

    Args:
        rename: a template with `{index}` (zero-padded, in graph order) and `{name}`, such as "{index}_{name}". It keeps
            the graph order and changes names so that their alphabetical order agrees with it. The trained model has
            the original names.

    Raises:
        GraphoptError: `rename` does not produce distinct names in alphabetical order.

    >>> model = graphopt.load(models.linear((2,), 1))
    >>> list(passes.SortInitializers(rename="{index}_{name}")(model).model.graph.initializers)
    ['0_layers.0.weight', '1_layers.0.bias']
    """

    rename: str | None = None

    def rewrite(self, model: ir.Model) -> None:
        graph = model.graph
        parameters = [value for value in graph.inputs if role_of(value) is Role.PARAMETER]
        initializers = list(graph.initializers.values())
        if self.rename is None:
            graph.initializers.clear()
            for value in sorted(initializers, key=name_of):
                graph.initializers.add(value)
        else:
            values = [*parameters, *initializers]
            width = len(str(len(values)))
            indexed = [self.rename.replace("{index}", f"{i:0{width}}") for i in range(len(values))]
            names = [own.replace("{name}", name_of(x)) for own, x in zip(indexed, values, strict=True)]
            if names != sorted(set(names)):
                raise GraphoptError(
                    f"rename={self.rename!r}: expected distinct names in alphabetical order, found others: start it "
                    f"with {{index}}"
                )
            for value, name in zip(values, names, strict=True):
                ORIGINAL_NAME.write(value, original_name(value))
                value.name = name
        others = [value for value in graph.inputs if role_of(value) is not Role.PARAMETER]
        graph.inputs.clear()
        graph.inputs.extend([*others, *sorted(parameters, key=name_of)])
