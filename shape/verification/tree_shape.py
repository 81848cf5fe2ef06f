"""How large a token tree is drafted. Nothing heavy is imported, so that options can be of it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TreeShape:
    """How a drafter grows its tree. A chain has width 1.

    Attributes:
        depth: drafted tokens on the longest path.
        width: nodes expanded per depth, the best by joint probability.
        branching: children considered per expanded node; None means ``width``.
        nodes: drafted nodes kept of all candidates, the best by joint probability; None keeps all.
        threshold: stop growing once no path's joint probability reaches this, as the drafter estimates it; 0 never
            stops. Looking costs a wait for the device: at every depth where each takes a pass of the network, else one.
    """

    depth: int = 4
    width: int = 3
    branching: int | None = None
    nodes: int | None = None
    threshold: float = 0.0

    @classmethod
    def full(cls, branching: int, depth: int) -> "TreeShape":
        """All branching^depth paths, as in the paper's tree rejection sampling."""
        return cls(depth=depth, width=branching ** (depth - 1), branching=branching)
