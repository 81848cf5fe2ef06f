"""Trees grown on the host."""

import math

from hypothesis import given
from hypothesis import strategies as st

from shape.drafters.growing import Paths, grow


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 5))
def test_the_likeliest_paths_are_kept(nodes, depth, seed):
    """Against all paths, in a language where what follows depends on the token before."""

    def following(token: int) -> dict[int, float]:
        shares = [1 + (token * 7 + other * 3 + seed) % 5 for other in range(3)]
        return {other: share / sum(shares) for other, share in enumerate(shares)}

    grown = grow(0, following, lambda _, token: token, nodes=nodes, depth=depth)
    every, ends = [], [(0, 0.0)]
    for _ in range(depth):
        ends = [(t, joint + math.log(p)) for token, joint in ends for t, p in following(token).items()]
        every += [joint for _, joint in ends]
    best = sorted(every, reverse=True)[:nodes]
    assert [round(joint, 9) for _, _, joint in grown] == [round(joint, 9) for joint in best]
    assert all(parent <= number for number, (_, parent, _) in enumerate(grown))
    assert len({(token, parent) for token, parent, _ in grown}) == len(grown)


def test_unlikely_paths_and_dead_ends():
    table = {1: {2: 0.9, 3: 0.1}, 2: {1: 0.5}}
    grown = grow(1, lambda token: table.get(token, {}), lambda _, token: token, nodes=9, depth=9, least=math.log(0.3))
    assert [(token, parent) for token, parent, _ in grown] == [(2, 0), (1, 1), (2, 2)]
    assert grow(7, lambda token: {}, lambda _, token: token, nodes=9, depth=9) == []
    assert grow(1, lambda token: table.get(token, {}), lambda _, token: token, nodes=9, depth=0) == []


def test_paths_share_what_they_begin_with():
    paths = Paths(nodes=5)
    assert paths.add([5, 6, 7], math.log(0.5), 0.5) == 3
    assert paths.add([5, 6, 8], math.log(0.9)) == 4 and paths.add([9], math.log(0.1), parent=2) == 5
    assert paths.add([4, 4], 0.0) == 0  # there is no room
    assert [(token, parent) for token, parent, _ in paths.grown] == [(5, 0), (6, 1), (7, 2), (8, 2), (9, 2)]
    joints = [joint for _, _, joint in paths.grown]
    assert all(joints[parent - 1] >= joint for (_, parent, joint) in paths.grown if parent)
    assert math.isclose(joints[2], math.log(0.125)) and math.isclose(joints[4], math.log(0.025))
