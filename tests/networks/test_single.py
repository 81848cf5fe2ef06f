"""The program for a single root against the network itself."""

import pytest
import torch
from helpers import committed

from shape.drafters.trained import TrainedDrafter
from shape.networks.base import Known
from shape.networks.config import ShapeConfig
from shape.networks.shape import ShapePredictor
from shape.networks.single import SingleRoot
from shape.target.quantize import QuantizedLinear
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree
from shape.verification.tree_shape import TreeShape

SIZE, WINDOW, STEPS = 12, 3, 4


REFINEMENTS = {
    "affine": {"refinement": "affine"},
    "column": {"refinement": "sinkhorn", "refinement_last_update": "column"},
    "row": {"refinement": "sinkhorn"},
    "one row": {"refinement": "sinkhorn", "refinement_iterations": 1},
    "barycentric": {"refinement": "sinkhorn", "refinement_readout": "barycentric"},
    "barycentric column": {
        "refinement": "sinkhorn",
        "refinement_readout": "barycentric",
        "refinement_last_update": "column",
    },
    "learned": {"refinement": "sinkhorn", "refinement_alpha_learned": True},
}


def predictor(dtype: torch.dtype = torch.float32, **options) -> ShapePredictor:
    """Small, with all weights away from their first values."""
    defaults = {"hidden_size": SIZE, "intermediate_size": 16, "window": WINDOW, "num_steps": STEPS}
    config = ShapeConfig(**{**defaults, "step_mode": "parallel", "refinement": "none", **options})
    torch.manual_seed(0)
    network = ShapePredictor(config).eval().requires_grad_(False)
    for weight in network.parameters():
        weight.add_(0.2 * torch.randn_like(weight))
    return network.to(dtype)


@pytest.mark.parametrize("conditioning", ["none", "root"])
@pytest.mark.parametrize("blocks", [0, 1, 2])
@pytest.mark.parametrize("layers", [[-1], [2, -1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_those_of_the_network(conditioning, blocks, layers, dtype) -> None:
    network = predictor(dtype, token_conditioning=conditioning, num_layers=blocks, feature_layers=layers)
    window, embedding = 5 * torch.randn(WINDOW, len(layers) * SIZE), torch.randn(SIZE)  # the target's are in float32
    single = SingleRoot.of(network)
    assert single is not None
    found = single(window[None], embedding[None])[0][0]
    # Rounding to bfloat16 comes at the end alone: the weights' own values are what both begin with.
    exact = network.float().begin(
        Known(window.to(dtype).float()[None, None], [], None, None), embedding.to(dtype)[None, None].float()
    )
    assert found.shape == (STEPS, SIZE) and found.dtype == dtype
    precision = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.float(), exact[0][0, 0], rtol=precision, atol=1e-5)


@pytest.mark.parametrize("name", REFINEMENTS)
@pytest.mark.parametrize("dim", [1, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_refined_states_are_those_of_the_network(name, dim, dtype) -> None:
    network = predictor(dtype, **REFINEMENTS[name], refinement_dim=dim, refinement_epsilon=0.3, refinement_alpha=0.4)
    window, embedding = 5 * torch.randn(WINDOW, SIZE), torch.randn(SIZE)
    single = SingleRoot.of(network)
    assert single is not None
    found = single(window[None], embedding[None])[0][0]
    known = Known(window.to(dtype).float()[None, None], [], None, None)
    embedding = embedding.to(dtype)[None, None].float()
    exact = network.float().begin(known, embedding)[0][0, 0]
    precision = 1e-4 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found.float(), exact, rtol=precision, atol=precision)
    network.refinement = None
    assert not torch.allclose(exact, network.begin(known, embedding)[0][0, 0], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("size", [SIZE, 64])
@pytest.mark.parametrize("name", ["none", "affine", "column", "row"])
def test_weights_of_8_bits_make_nearly_the_same(name, size) -> None:
    """Also where widths are filled up to what the kernels take."""
    options = {"hidden_size": size, "intermediate_size": size + 4, **REFINEMENTS.get(name, {})}
    network = predictor(**options, num_layers=1, **({} if name == "none" else {"refinement_dim": 8}))
    window, embedding = 5 * torch.randn(WINDOW, size), torch.randn(size)
    exact = network.begin(Known(window[None, None], [], None, None), embedding[None, None])[0][0, 0]
    single = SingleRoot.of(network, 8)
    assert single is not None
    change, found = exact - window[-1], single(window[None], embedding[None])[0][0] - window[-1]
    assert 0 < (found - change).norm() < 0.05 * change.norm()


@pytest.mark.parametrize("name", ["column", "row"])
def test_the_kernel_follows_the_weights(name) -> None:
    network = predictor(**REFINEMENTS[name], refinement_dim=6)
    window, embedding = torch.randn(WINDOW, SIZE), torch.randn(SIZE)
    single = SingleRoot.of(network)
    assert single is not None
    before = single(window[None], embedding[None])[0]
    network.refinement.expand.weight.add_(torch.randn_like(network.refinement.expand.weight))
    single.renew()
    after = single(window[None], embedding[None])[0]
    assert not torch.allclose(before, after, atol=1e-3)
    assert torch.equal(after, SingleRoot.of(network)(window[None], embedding[None])[0])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_head(biased, dtype) -> None:
    """Of states before they are rounded, but for that."""
    network, size, count = predictor(dtype, hidden_size=32), 32, 21
    torch.manual_seed(1)
    layer = torch.nn.Linear(size, count, biased).to(dtype).requires_grad_(False)
    head = QuantizedLinear(layer, 8)
    given = 5 * torch.randn(2, WINDOW, size), torch.randn(2, size)
    states, logits = SingleRoot.of(network, None, head)(*given)
    assert logits.shape == (2, STEPS, count) and logits.dtype == torch.float32
    assert torch.equal(states, SingleRoot.of(network)(*given)[0])
    exact = head.float()(SingleRoot.of(network.float())(*given)[0])
    scale = exact.abs().max().item()
    torch.testing.assert_close(logits, exact, rtol=0, atol=scale * (1e-4 if dtype == torch.float32 else 2e-2))
    assert SingleRoot.of(network, None, layer)(*given)[1] is None  # no kernel's


def test_a_draft_begins_with_the_weights_as_they_are(tiny_target) -> None:
    """A drafter of a predictor in training sees its next weights, from the next text on."""
    options = {"hidden_size": tiny_target.hidden_size, "vocab_size": tiny_target.vocab_size}
    network = predictor(**options)
    drafter = TrainedDrafter(network)
    drafter.bind(tiny_target)
    window = torch.randn(1, WINDOW, tiny_target.hidden_size)
    begun = committed([1, 2, 3, 4])
    found = []
    for factor in (1, 2):
        network.window_projection.weight.mul_(factor)
        drafter.start(begun, window)
        found.append(drafter.single(window, torch.ones(1, tiny_target.hidden_size))[0])
    assert not torch.equal(*found)


@pytest.mark.parametrize("rows", [2, 4])
def test_sequences_draft_together_as_alone(tiny_target, rows) -> None:
    """By a call each."""
    size = tiny_target.hidden_size
    network = predictor(hidden_size=size, vocab_size=tiny_target.vocab_size)
    drafter = TrainedDrafter(network, TreeShape(depth=3, width=2, branching=3))
    drafter.bind(tiny_target)
    texts, hidden = [[1, 2, 3 + row] for row in range(rows)], torch.randn(rows, WINDOW, size)

    def draft(first: int, end: int) -> TokenTree:
        own = committed(*texts[first:end])
        drafter.start(own, hidden[first:end])
        return drafter.draft(own, Sampler(own.lengths - 1))

    together = draft(0, rows)
    for row in range(rows):
        alone = draft(row, row + 1)
        assert torch.equal(together.tokens[row], alone.tokens[0])
        assert torch.equal(together.parent[row], alone.parent[0])
        torch.testing.assert_close(together.joint[row], alone.joint[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"step_mode": "recursive"}, {"attention": True, "num_heads": 2}],
    ids=lambda options: next(iter(options)),
)
def test_other_networks_are_left_to_themselves(options) -> None:
    assert SingleRoot.of(predictor(**options)) is None
    assert SingleRoot.of(predictor(torch.float64)) is None
