"""The parts that trained networks share, against their definitions."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import BASELINES, WIDTHS, predictor

from shape.errors import ConfigError
from shape.networks.base import known_at
from shape.networks.config import ShapeConfig
from shape.networks.registry import PREDICTORS
from shape.networks.shape import windows
from shape.target.model import Target

KINDS = {**BASELINES, **WIDTHS}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_all_of_its_weights(kind):
    network = predictor(torch.float32, **KINDS[kind], loud=True).train()
    size, steps = network.config.hidden_size, network.config.num_steps
    features = torch.randn(2, 9, 32 * len(network.config.feature_layers))
    embeddings, roots = torch.randn(2, 10, size), torch.tensor([[1, 4, 8], [2, 3, 0]])
    known = known_at(network, features, embeddings, roots, windows(features, roots, network.config.window))
    along, tokens = torch.randn(2, 3, steps, size), torch.randint(64, (2, 3, steps))
    states = network.unroll(known, along)
    assert states.shape == (2, 3, steps, size)
    head = network.own_head if network.heads else torch.nn.Linear(size, 64)
    draftable = network.reduced(torch.arange(64), torch.randn(64, size))
    coupled = network.before_bias(head(states), draftable)
    logits = network.bias(coupled, network.reduced(tokens, along, states))
    assert network.selector is not None or logits.isfinite().all()
    total = logits[logits.isfinite()].square().mean()  # of a selector those of its candidates
    if network.config.confidence:
        total = total + network.estimate(states, tokens, along).square().mean()
    total.backward()
    for name, weight in network.named_parameters():
        if name == "embed_tokens.weight" and weight.grad is None:  # states were given their embeddings
            continue
        assert weight.grad is not None and weight.grad.isfinite().all() and weight.grad.any(), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_survives_its_files(kind, tmp_path):
    network = predictor(torch.float32, **KINDS[kind], loud=True)
    network.save_pretrained(tmp_path)
    loaded = PREDICTORS[network.kind].from_pretrained(tmp_path)
    assert type(loaded) is type(network) and loaded.config.kind == network.kind
    for (name, mine), (_, theirs) in zip(network.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert torch.equal(mine, theirs), name
    if network.memory_shapes:  # frequencies are no weights, and loading makes networks without memory for these
        positions = torch.arange(9)
        assert torch.equal(*(each.rotary(positions, torch.float32) for each in (network, loaded)))


def test_untrained_heads_draft_what_the_target_says():
    """Medusa's heads start as the target's: all of them say at first what the last known state says."""
    network = predictor(torch.float32, kind="medusa", own_heads=True)
    weight = torch.randn(64, 32)
    network.adopt(SimpleNamespace(output_rows=lambda tokens: weight))
    state = torch.randn(1, 1, 1, 32)
    known = known_at(network, state[:, 0], None, torch.tensor([[1]]), state)
    logits = network.own_head(network.unroll(known, None))
    torch.testing.assert_close(logits, F.linear(state, weight).expand_as(logits))


def test_a_target_of_another_dtype_gives_embeddings_and_heads(tiny_target):
    target = Target(copy.deepcopy(tiny_target.model).bfloat16())
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    network = predictor(torch.float32, kind="eagle", own_heads=True, own_embeddings=True, **sizes)
    network.adopt(target)
    assert torch.equal(network.embed_tokens.weight, target.embed(torch.arange(target.vocab_size)).float())
    assert torch.equal(network.lm_head.weight, target.output_rows().float())


@pytest.mark.parametrize("kind", WIDTHS)
def test_drafters_of_another_width_start_as_projections_of_the_targets_embeddings(kind, tiny_target):
    """Products of rows are kept, by a narrow one as well as so few numbers can."""
    options = {**WIDTHS[kind], "vocab_size": tiny_target.vocab_size}
    network = predictor(torch.float32, **options)
    network.adopt(tiny_target)
    rows = {
        "embed_tokens": tiny_target.embed(torch.arange(tiny_target.vocab_size)),
        "lm_head": tiny_target.output_rows(),
    }
    for name, whole in rows.items():
        u, values, v = torch.linalg.svd(whole, full_matrices=False)
        size = network.config.hidden_size
        best = (u[:, :size] * values[:size]) @ v[:size]
        own = getattr(network, name).weight
        assert own.shape == (len(whole), size)
        torch.testing.assert_close(own @ own.T, best @ best.T, rtol=1e-3, atol=1e-3)


def test_tables_need_a_vocabulary_and_classes_their_kind():
    with pytest.raises(ConfigError, match="give draft_vocab_size"):
        PREDICTORS["medusa"](ShapeConfig(hidden_size=32, kind="medusa", own_heads=True))
    with pytest.raises(ConfigError, match="of kind 'eagle', and MedusaPredictor is 'medusa'"):
        PREDICTORS["medusa"](ShapeConfig(hidden_size=32, kind="eagle"))


@pytest.mark.filterwarnings("error:.*dtype")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_computes_in_mixed_precision_and_in_bfloat16(kind):
    """As training under autocast does with bfloat16 features, and decoding with bfloat16 weights."""
    network = predictor(torch.float32, **KINDS[kind], loud=True)
    config, small = network.config, torch.bfloat16
    size, features = config.hidden_size, torch.randn(2, 9, 32 * len(config.feature_layers), dtype=small)
    embeddings, roots = torch.randn(2, 10, size, dtype=small), torch.tensor([[1, 4, 8], [2, 3, 0]])
    window, along = windows(features, roots, config.window), torch.randn(2, 3, config.num_steps, size, dtype=small)
    head, draftable = torch.randn(64, size), (torch.arange(64), torch.randn(64, size, dtype=small))
    tokens = torch.randint(64, (2, 3, config.num_steps))

    def logits(weights: torch.Tensor) -> torch.Tensor:
        states = network.unroll(known_at(network, features, embeddings, roots, window), along)
        with torch.autocast("cpu", enabled=False):
            own = network.own_head(states) if network.heads else F.linear(states.to(weights.dtype), weights)
            coupled = network.before_bias(own, network.reduced(*draftable))
            return network.bias(coupled, network.reduced(tokens, along, states))

    with torch.autocast("cpu", small):
        mixed = logits(head)
    assert mixed.dtype == torch.float32
    mixed.square().mean().backward()
    network.to(small)
    assert logits(head.to(small)).dtype == small
