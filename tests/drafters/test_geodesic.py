"""Trajectories that are known, followed further."""

import math

import pytest
import torch

from shape.drafters import GeodesicDrafter
from shape.drafters.geodesic import PATHS, acceleration, analogue, follow, geodesic, line, parabola
from shape.errors import ConfigError

NONE = torch.zeros(9, dtype=torch.long)


def curve(*coefficients: float) -> torch.Tensor:
    """(10, 2) points of a polynomial, of which the tests know the first nine."""
    times = torch.arange(10, dtype=torch.float64)
    return torch.stack([sum(c * times**n for n, c in enumerate(coefficients)), 3 + times], dim=1)


@pytest.mark.parametrize(("path", "order"), [(line, 1), (acceleration, 2), (parabola, 2)])
def test_polynomials_are_followed(path, order):
    points = curve(1.0, 2.0, -0.5)[: 9 + 1] if order == 2 else curve(1.0, 2.0)
    assert torch.allclose(path(points[:-1], NONE), points[-1], atol=1e-6)
    assert order == 2 or torch.allclose(geodesic(points[:-1], NONE), points[-1])  # without acceleration it is a line


def test_a_geodesic_turns_as_its_neighbours_did():
    """On a circle the acceleration belongs to the place: known from the last time round, at another speed too."""

    def round_(angles: torch.Tensor) -> torch.Tensor:
        return torch.stack([angles.cos(), angles.sin()], dim=1)

    slow, fast = math.tau / 200, math.tau / 100
    before = torch.arange(0, 250, dtype=torch.float64) * slow
    angles = torch.cat([before, before[-1] + torch.arange(1, 40, dtype=torch.float64) * fast])
    points, expected = round_(angles), round_(angles[-1:] + fast)[0]
    off = (geodesic(points, NONE) - expected).norm()
    assert off < 0.1 * (line(points, NONE) - expected).norm()


def test_the_analogue_goes_where_its_like_went_with_the_same_token():
    states = torch.tensor([[0.0, 0], [1, 5], [9, 9], [0, 0], [1, -5], [9, 9], [0.0, 0.0]])
    assert analogue(states, torch.tensor([0, 7, 0, 0, 8, 0, 0, 7])).tolist() == pytest.approx([1, 5])
    assert analogue(states, torch.tensor([0, 7, 0, 0, 8, 0, 0, 8])).tolist() == pytest.approx([1, -5])
    assert analogue(states, torch.tensor([0, 7, 0, 0, 8, 0, 0, 6])).tolist() == pytest.approx([1, 0])


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_points_keep_their_length_and_short_texts_do(path):
    torch.manual_seed(0)
    for known in (1, 2, 3, 12):
        states = torch.randn(known, 5)
        found = follow(states, torch.arange(known + 1), path, steps=4)
        assert found.shape == (4, 5) and torch.allclose(found.norm(dim=1), states[-1].norm())


def test_unknown_paths_are_refused():
    with pytest.raises(ConfigError, match="path 'zigzag' is unknown; use one of line, acceleration"):
        GeodesicDrafter("zigzag")
