"""Networks with the same number of parameters, for comparisons on equal terms."""

from copy import deepcopy

from shape.errors import ConfigError
from shape.networks.config import ShapeConfig
from shape.networks.sizing import parameters

_TOLERANCE = 0.1


def as_large_as(wanted: int, config: ShapeConfig) -> dict[str, int]:
    """The option, and its value, with which a network comes nearest to so many parameters: its inner width, or for
    Medusa, whose own heads are its parameters, the number of tokens that it drafts from.

    Raises:
        ConfigError: that misses the number by more than a tenth.
    """
    medusa = config.kind == "medusa"
    name, unit = ("draft_vocab_size", 32) if medusa else ("intermediate_size", 16)
    most = wanted // unit if not medusa else (config.vocab_size or 0) // unit if config.own_heads else 1

    def at(units: int) -> int:
        changed = deepcopy(config)
        setattr(changed, name, units * unit)
        return parameters(changed)

    low, high = 1, max(most, 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle) <= wanted else (low, middle)
    nearest = min((low, high), key=lambda units: abs(at(units) - wanted))
    if abs(at(nearest) / wanted - 1) > _TOLERANCE:
        raise ConfigError(
            f"no {name} gives a network of kind {config.kind} about {wanted:,} parameters; leave same_size_as out, or "
            "change what else decides its size"
        )
    return {name: unit * nearest}
