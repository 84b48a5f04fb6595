"""How much less often a node of a large cluster looks at all the others: the work of a look grows with their number."""

from __future__ import annotations

FEW = 10
"""Nodes up to which nothing is put off."""


def slower(nodes: int) -> float:
    """By which factor pauses are longer among so many nodes."""
    return max(1.0, nodes / FEW)
