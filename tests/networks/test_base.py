"""The parts that trained networks share, against their definitions."""

import pytest
import torch
import torch.nn.functional as F
from helpers import BASELINES, predictor
from hypothesis import given, settings
from hypothesis import strategies as st

from shape.drafters import PREDICTORS
from shape.errors import ConfigError
from shape.networks.base import ContextAttention, MarkovBias, known_at, rotary_table, rotate
from shape.networks.config import ShapeConfig
from shape.networks.shape import windows


def attention(**options) -> ContextAttention:
    torch.manual_seed(0)
    return ContextAttention(12, 6, ShapeConfig(hidden_size=8, num_heads=2, **options)).double()


@pytest.mark.parametrize("ends", [None, (5, 2)])
@pytest.mark.parametrize("own", [0, 3])
def test_attention_is_softmax_over_what_a_node_sees(ends, own):
    """Known positions up to each row's end, and keys of the node's own path, one by one."""
    module, rows, nodes, known = attention(), 2, 3, 5
    places, query = torch.randn(rows, known, 12).double(), torch.randn(rows, nodes, 12).double()
    positions = rotary_table(torch.arange(known).expand(rows, -1), 4, torch.float64)
    at = rotary_table(torch.tensor([[7], [9]]), 4, torch.float64)
    memory = module.remember(places, places, positions)
    visible = None if ends is None else torch.arange(known) < torch.tensor(ends)[:, None, None]
    path = torch.randn(rows, nodes, own, 12).double()
    path_keys, path_values = (
        linear(path).unflatten(-1, (2, 4)).permute(0, 3, 1, 2, 4) for linear in (module.key, module.value)
    )
    found = module(query, at, memory, visible, (path_keys, path_values) if own else None)
    asked = rotate(module.query(query).unflatten(-1, (2, 4)).transpose(1, 2), at)
    for row in range(rows):
        seen = known if ends is None else ends[row]
        for node in range(nodes):
            heads = []
            for head in range(2):
                keys = torch.cat([memory[0][row, head, :seen], path_keys[row, head, node]])
                values = torch.cat([memory[1][row, head, :seen], path_values[row, head, node]])
                weights = (keys @ asked[row, head, node] / 2.0).softmax(-1)
                heads.append(weights @ values)
            torch.testing.assert_close(found[row, node], module.out(torch.cat(heads)))


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 50))
@settings(max_examples=30, deadline=None)
def test_rotary_products_depend_on_distance_alone(first, second, shift):
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8).double().unbind(0)

    def product(at: int, other: int) -> torch.Tensor:
        rotary = [rotary_table(torch.tensor([[where]]), 8, torch.float64) for where in (at, other)]
        return (rotate(query, rotary[0]) * rotate(key, rotary[1])).sum()

    torch.testing.assert_close(product(first, second), product(first + shift, second + shift), rtol=1e-3, atol=1e-3)
    assert torch.equal(rotate(query, rotary_table(torch.tensor([[0]]), 8, torch.float64)), query)


def test_a_root_that_sees_nothing_gives_numbers():
    """Padding among a batch's roots: no NaN may reach the gradient of the others."""
    module = attention()
    places = torch.randn(1, 4, 12, dtype=torch.float64, requires_grad=True)
    memory = module.remember(places, places, rotary_table(torch.arange(4)[None], 4, torch.float64))
    visible = torch.arange(4) < torch.tensor([[[0], [3]]])
    for own in (None, tuple(torch.randn(1, 2, 2, 1, 4).double() for _ in range(2))):
        found = module(places[:, :2], rotary_table(torch.tensor([[0, 3]]), 4, torch.float64), memory, visible, own)
        assert found.isfinite().all()
        (gradient,) = torch.autograd.grad(found.sum(), places, retain_graph=True)
        assert gradient.isfinite().all()


@given(st.integers(0, 10**6), st.integers(2, 6))
@settings(max_examples=30, deadline=None)
def test_coupled_steps_keep_their_marginals(seed, size):
    """With the whole vocabulary as candidates, chaining the conditionals gives back what the steps said alone."""
    generator = torch.Generator().manual_seed(seed)
    bias = MarkovBias(5, 3, size).double()
    torch.nn.init.normal_(bias.expand.weight, std=0.5, generator=generator)
    logits = torch.randn(2, 4, size, generator=generator).double()
    tokens = torch.randn(size, 5, generator=generator).double()
    coupled = bias.couple(logits, bias.reduced(tokens), candidates=size, iterations=400)
    assert torch.equal(coupled[:, 0], logits[:, 0])
    pushed = logits[:, 0].softmax(-1)
    for n in range(1, 4):
        conditional = (coupled[:, n, None] + bias(bias.reduced(tokens))).softmax(-1)  # (B, before, after)
        pushed = (pushed[:, :, None] * conditional).sum(1)
        torch.testing.assert_close(pushed, logits[:, n].softmax(-1), rtol=1e-3, atol=1e-4)
    biased = (logits[:, 0].softmax(-1)[:, :, None] * (logits[:, 1, None] + bias(bias.reduced(tokens))).softmax(-1)).sum(
        1
    )
    assert (biased - logits[:, 1].softmax(-1)).abs().max() > 1e-6  # without the coupling they are not kept


@pytest.mark.parametrize("kind", BASELINES)
def test_every_kind_trains_all_of_its_weights(kind):
    network = predictor(torch.float32, **BASELINES[kind], loud=True).train()
    size, steps = 32, network.config.num_steps
    features = torch.randn(2, 9, size * len(network.config.feature_layers))
    embeddings, roots = torch.randn(2, 10, size), torch.tensor([[1, 4, 8], [2, 3, 0]])
    known = known_at(network, features, embeddings, roots, windows(features, roots, network.config.window))
    along = torch.randn(2, 3, steps, size)
    states = network.unroll(known, along)
    assert states.shape == (2, 3, steps, size)
    head = network.own_head if network.heads is not None else torch.nn.Linear(size, 64)
    logits = network.bias(network.couple(head(states), network.reduced(torch.randn(64, size))), network.reduced(along))
    total = logits.square().mean()
    if network.confidence is not None:
        total = total + network.estimate(states, along).square().mean()
    total.backward()
    for name, weight in network.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all() and weight.grad.any(), name


@pytest.mark.parametrize("kind", BASELINES)
def test_every_kind_survives_its_files(kind, tmp_path):
    network = predictor(torch.float32, **BASELINES[kind], loud=True)
    network.save_pretrained(tmp_path)
    loaded = PREDICTORS[network.kind].from_pretrained(tmp_path)
    assert type(loaded) is type(network) and loaded.config.kind == network.kind
    for (name, mine), (_, theirs) in zip(network.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert torch.equal(mine, theirs), name


def test_untrained_heads_draft_what_the_target_says():
    """Medusa's heads start as the target's: all of them say at first what the last known state says."""
    network = predictor(torch.float32, kind="medusa", own_heads=True)
    weight = torch.randn(64, 32)
    network.adopt_head(weight)
    state = torch.randn(1, 1, 1, 32)
    known = known_at(network, state[:, 0], None, torch.tensor([[1]]), state)
    logits = network.own_head(network.unroll(known, None))
    torch.testing.assert_close(logits, F.linear(state, weight).expand_as(logits))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "lookahead"}, "kind is 'lookahead'"),
        ({"kind": "eagle", "num_layers": 2}, "eagle has 1 decoder layer"),
        ({"kind": "block", "num_layers": 0}, "block at least 1"),
        ({"kind": "medusa", "refinement": "affine"}, "refinement is 'affine', which is SHAPE's"),
        ({"kind": "block", "own_heads": True, "vocab_size": 9}, "own_heads is for medusa and eagle"),
        ({"attention": True, "num_heads": 3}, "num_heads is 3"),
        ({"markov_rank": 4, "step_mode": "recursive", "token_conditioning": "path"}, "markov_rank is 4"),
        ({"coupling": 4}, "give a markov_rank"),
        ({"markov_rank": -1}, "markov_rank is -1"),
        ({"refinement_readout": "mean"}, "refinement_readout is 'mean'"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ShapeConfig(hidden_size=32, **options)


def test_tables_need_a_vocabulary_and_classes_their_kind():
    with pytest.raises(ConfigError, match="give draft_vocab_size"):
        PREDICTORS["medusa"](ShapeConfig(hidden_size=32, kind="medusa", own_heads=True))
    with pytest.raises(ConfigError, match="of kind 'eagle', and MedusaPredictor is 'medusa'"):
        PREDICTORS["medusa"](ShapeConfig(hidden_size=32, kind="eagle"))


@pytest.mark.filterwarnings("error:.*dtype")
@pytest.mark.parametrize("kind", BASELINES)
def test_every_kind_computes_in_mixed_precision_and_in_bfloat16(kind):
    """As training under autocast does with bfloat16 features, and decoding with bfloat16 weights."""
    network = predictor(torch.float32, **BASELINES[kind], loud=True)
    config, small = network.config, torch.bfloat16
    features = torch.randn(2, 9, 32 * len(config.feature_layers), dtype=small)
    embeddings, roots = torch.randn(2, 10, 32, dtype=small), torch.tensor([[1, 4, 8], [2, 3, 0]])
    window, along = windows(features, roots, config.window), torch.randn(2, 3, config.num_steps, 32, dtype=small)
    head, tokens = torch.randn(64, 32), torch.randn(64, 32, dtype=small)

    def logits(weights: torch.Tensor) -> torch.Tensor:
        states = network.unroll(known_at(network, features, embeddings, roots, window), along)
        with torch.autocast("cpu", enabled=False):
            own = network.own_head(states) if network.heads is not None else F.linear(states.to(weights.dtype), weights)
            return network.bias(network.couple(own, network.reduced(tokens)), network.reduced(along))

    with torch.autocast("cpu", small):
        mixed = logits(head)
    assert mixed.dtype == torch.float32
    mixed.square().mean().backward()
    network.to(small)
    assert logits(head.to(small)).dtype == small
