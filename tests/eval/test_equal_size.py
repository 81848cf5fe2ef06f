import pytest

from eval.equal_size import as_large_as
from shape.errors import ConfigError
from shape.networks.config import ShapeConfig
from shape.networks.sizing import parameters

TARGET = {"hidden_size": 64, "vocab_size": 2048}
KINDS = {
    "shape": {"num_steps": 4},
    "recursive": {"step_mode": "recursive", "token_conditioning": "path", "num_steps": 3},
    "medusa": {"kind": "medusa", "own_heads": True, "num_steps": 4, "draft_vocab_size": 512, "markov_rank": 0},
    "eagle": {"kind": "eagle", "num_steps": 3, "markov_rank": 0},
    "block": {"kind": "block", "num_steps": 3},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wanted", [200_000, 400_000])
def test_nearest_size(kind, wanted):
    config = ShapeConfig(**TARGET, **KINDS[kind])
    ((name, value),) = as_large_as(wanted, config).items()
    sizes, unit = {}, 32 if kind == "medusa" else 16
    for other in (value, value - unit, value + unit):
        sizes[other] = parameters(ShapeConfig(**TARGET, **{**KINDS[kind], name: other}))
    assert min(sizes, key=lambda each: abs(sizes[each] - wanted)) == value
    assert abs(sizes[value] / wanted - 1) < 0.1


@pytest.mark.parametrize(
    ("wanted", "options"),
    [(1000, KINDS["shape"]), (10**6, KINDS["medusa"]), (200_000, {**KINDS["medusa"], "own_heads": False})],
)
def test_sizes_out_of_reach(wanted, options):
    with pytest.raises(ConfigError, match="gives a network of kind"):
        as_large_as(wanted, ShapeConfig(**TARGET, **options))
