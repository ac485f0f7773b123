"""Answer which nodes of a graph lead to which."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from graphopt.graph.traversal import dependencies, values_read


class Reach:
    """Keep, for each node, the nodes that lead to it and those that it leads to, as bit masks.

    Args:
        asked: the nodes that questions are about, until they are made one.
    """

    def __init__(self, graph: ir.Graph, asked: Iterable[ir.Node]) -> None:
        self._index = {node: i for i, node in enumerate(graph)}
        self._asked = sum(1 << self._index[node] for node in asked)
        self._before = [mask & ~(1 << i) for i, mask in enumerate(dependencies(graph).values())]
        self._after = [0] * len(self._index)
        for node, i in reversed(self._index.items()):
            for producer in {x.producer() for x in values_read(node)}:
                if producer in self._index:
                    self._after[self._index[producer]] |= self._after[i] | 1 << i

    def is_convex(self, nodes: Iterable[ir.Node], node: ir.Node) -> bool:
        """Return whether no path between a node and the others leads through a third."""
        inside, before, after = self._around(nodes)
        i = self._index[node]
        between = (self._before[i] & after) | (self._after[i] & before)
        return not between & ~inside & ~(1 << i)

    def leads(self, node: ir.Node, others: Iterable[ir.Node]) -> bool:
        after = self._after[self._index[node]]
        return any(after >> self._index[other] & 1 for other in others)

    def connect(self, nodes: Iterable[ir.Node], node: ir.Node) -> None:
        """Make nodes lead to another."""
        i, (inside, before, _) = self._index[node], self._around(nodes)
        before, after = before | inside, self._after[i] | 1 << i
        for j in _bits(after & self._asked):
            self._before[j] |= before
        for j in _bits(before & self._asked):
            self._after[j] |= after

    def contract(self, nodes: Iterable[ir.Node]) -> None:
        """Make nodes one: whatever leads to one of them leads to all."""
        inside, before, after = self._around(nodes)
        self._asked &= ~inside
        for i in _bits(before & self._asked):
            self._after[i] |= after | inside
        for i in _bits(after & self._asked):
            self._before[i] |= before | inside

    def _around(self, nodes: Iterable[ir.Node]) -> tuple[int, int, int]:
        """Return nodes, the others that lead to them, and the others that they lead to."""
        inside = before = after = 0
        for node in nodes:
            i = self._index[node]
            inside |= 1 << i
            before |= self._before[i]
            after |= self._after[i]
        return inside, before & ~inside, after & ~inside


def _bits(mask: int) -> list[int]:
    """Return the places of the ones in a mask, by NumPy: an integer of many digits is copied for each operation."""
    content = np.frombuffer(mask.to_bytes(mask.bit_length() // 8 + 1, "little"), np.uint8)
    places: list[int] = np.flatnonzero(np.unpackbits(content, bitorder="little")).tolist()
    return places
