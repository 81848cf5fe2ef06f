"""How large a token tree is drafted. Nothing heavy is imported, so that options can be of it."""

from dataclasses import dataclass, replace

from shape.errors import ConfigError, require


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

    Raises:
        ConfigError: nothing would be drafted.
    """

    depth: int = 4
    width: int = 3
    branching: int | None = None
    nodes: int | None = None
    threshold: float = 0.0

    def __post_init__(self) -> None:
        require(self, "depth width branching nodes", least=1, group="tree.")
        if not 0 <= self.threshold < 1:
            raise ConfigError(f"tree.threshold is {self.threshold}; give a probability from 0 to below 1")

    @classmethod
    def full(cls, branching: int, depth: int) -> "TreeShape":
        """All branching^depth paths, as in the paper's tree rejection sampling."""
        return cls(depth=depth, width=branching ** (depth - 1), branching=branching)

    def within(self, depth: int | None, children: int | None) -> "TreeShape":
        """The shape at most so deep, and with at most so many children of a node; None leaves it."""
        shape = self if depth is None else replace(self, depth=min(self.depth, depth))
        return shape if children is None else replace(shape, branching=min(shape.branching or shape.width, children))
