"""The cache against plain concatenation of committed states."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from shape.target.support import LayerShape
from shape.verification.cache import Group, KVCache, grouped

SHAPES = [LayerShape((2, 3), (2, 3)), LayerShape((2, 3), (1, 4))]


def states(batch: int, new: int, stamp: float) -> torch.Tensor:
    """Values that tell which row, node and write they come from."""
    return stamp + torch.arange(batch)[:, None] * 100 + torch.arange(new)[None]


@given(st.data())
def test_rows_advance_raggedly(data):
    batch = data.draw(st.integers(1, 4))
    cache = KVCache(SHAPES, batch, 6, torch.float64, torch.device("cpu"))
    lengths = [data.draw(st.integers(1, 4)) for _ in range(batch)]
    stamps = states(batch, max(lengths), 0.5)
    expected = [stamps[row, : lengths[row]].tolist() for row in range(batch)]
    write(cache, stamps)
    cache.set_lengths(list(lengths))
    for step in range(1, 4):
        nodes = data.draw(st.integers(1, 5))
        stamps = states(batch, nodes, step * 1000.0)
        cache.reserve(nodes)
        write(cache, stamps)
        counts = [data.draw(st.integers(1, nodes)) for _ in range(batch)]
        paths = [[0, *sorted(data.draw(st.permutations(range(1, nodes)))[: count - 1])] for count in counts]
        cache.commit(paths)
        for row, path in enumerate(paths):
            expected[row] += stamps[row, path].tolist()
        if batch > 1 and data.draw(st.booleans()):
            keep = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=5))
            cache.select(torch.tensor(keep))
            expected, batch = [[*expected[row]] for row in keep], len(keep)
        assert cache.host_lengths == cache.lengths.tolist() == [len(row) for row in expected]
        for layer in cache.layers:
            for stored in (layer.keys, layer.values):
                for row, committed in enumerate(expected):
                    assert stored[row, 0, : len(committed), 0].tolist() == committed


def write(cache: KVCache, stamps: torch.Tensor) -> None:
    for index, shape in enumerate(SHAPES):
        keys, values = (
            stamps[:, None, :, None].double().expand(-1, heads, -1, size) for heads, size in (shape.keys, shape.values)
        )
        shown_keys, shown_values = cache.update(keys, values, index)
        assert shown_keys.shape[2] == shown_values.shape[2] == cache.longest + stamps.shape[1]


def test_a_sequence_that_has_stopped_gives_its_place_to_the_last():
    """Nothing else moves, and nothing is allocated: memory could not hold the cache of a large batch twice."""
    cache = KVCache(SHAPES, 4, 6, torch.float64, torch.device("cpu"))
    write(cache, states(4, 6, 0.5))
    cache.set_lengths([2, 6, 3, 4])
    before = [(layer.keys.clone(), layer.keys.data_ptr()) for layer in cache.layers]
    cache.select(torch.tensor([0, 3, 2]))
    assert cache.host_lengths == [2, 4, 3]
    for layer, (keys, place) in zip(cache.layers, before, strict=True):
        assert layer.keys.data_ptr() == place and torch.equal(layer.keys[[0, 2]], keys[[0, 2]])
        assert torch.equal(layer.keys[1, :, :4], keys[3, :, :4])
        assert torch.equal(layer.keys[1, :, 4:], keys[1, :, 4:])  # not committed, so not moved


def test_a_contiguous_path_moves_nothing():
    cache = KVCache(SHAPES, 1, 8, torch.float64, torch.device("cpu"))
    write(cache, states(1, 4, 1.0))
    before = cache.layers[0].keys.clone()
    cache.commit([[0, 1, 2]])
    assert torch.equal(cache.layers[0].keys, before) and cache.host_lengths == [3]


def test_states_share_a_tensor_where_shape_dtype_and_device_agree():
    cpu, other = torch.device("cpu"), torch.device("meta")
    shapes = [
        LayerShape((2, 3), (2, 3)),
        LayerShape((2, 3), (1, 4), device=other),
        LayerShape((2, 3), (2, 3), dtype=torch.float16),
    ]
    assert grouped(shapes, torch.float32, cpu) == [
        (Group(2, 3, torch.float32, cpu), Group(2, 3, torch.float32, cpu)),
        (Group(2, 3, torch.float32, other), Group(1, 4, torch.float32, other)),
        (Group(2, 3, torch.float16, cpu), Group(2, 3, torch.float16, cpu)),
    ]
    # A target that is moved takes along what has no device of its own.
    assert grouped(shapes, torch.float32, other)[0][0].device == other


def test_layers_on_two_devices():
    """Rows of unequal length through update, commit, reserve and select; "meta" has devices and no numbers."""
    cpu, other = torch.device("cpu"), torch.device("meta")
    cache = KVCache([LayerShape((2, 3), (2, 3)), LayerShape((2, 3), (2, 3), device=other)], 2, 6, torch.float64, cpu)

    def write_both(stamps: torch.Tensor) -> None:
        new = stamps[:, None, :, None].double().expand(-1, 2, -1, 3)
        for index, device in enumerate((cpu, other)):
            keys, values = cache.update(new.to(device), new.to(device), index)
            assert keys.device == values.device == device
            assert keys.shape == values.shape == (2, 2, cache.longest + stamps.shape[1], 3)

    write_both(states(2, 3, 0.5))
    cache.set_lengths([3, 1])
    cache.reserve(6)
    write_both(states(2, 4, 1000.0))
    cache.commit([[0, 2, 3], [0, 3]])
    assert cache.layers[0].keys[0, 0, :6, 0].tolist() == [0.5, 1.5, 2.5, 1000.0, 1002.0, 1003.0]
    assert cache.layers[0].keys[1, 0, :3, 0].tolist() == [100.5, 1100.0, 1103.0]
    cache.select(torch.tensor([1]))
    assert cache.host_lengths == [3] and cache.layers[0].keys[0, 0, 2, 0] == 1103.0
    assert [layer.keys.device for layer in cache.layers] == [cpu, other] and cache.layers[1].keys.shape[0] == 1
