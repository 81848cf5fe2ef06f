"""DFlash, DFlash2 and DSpark against the package speculators: tests/fixtures, made by eval/reference/dflash.py."""

import json
import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT
from safetensors.torch import load_file
from torch import Tensor

from shape.errors import ConfigError
from shape.networks.base import Known, known_at
from shape.networks.block import BlockPredictor
from shape.networks.config import ShapeConfig
from shape.networks.layers import StateMarkov
from shape.networks.shape import windows
from shape.training.losses import acceptance_loss, selector_loss, weighted_loss
from shape.training.options import Losses

FIXTURES = (
    "dflash", "dflash-sliding", "dflash-sliding-whole", "dflash-narrow", "dspark", "dspark-masks", "dspark-gated",
    "dspark-rnn", "dflash2",
)  # fmt: skip


OURS = {
    "candidate_selector.predecessor_codebook": "markov_head.markov_w1.weight",
    "candidate_selector.successor_codebook": "markov_head.markov_w2.weight",
    "candidate_selector.hidden_projection.weight": "markov_head.hidden_projection.weight",
}


class Reference(NamedTuple):
    network: BlockPredictor
    head: Tensor
    found: dict[str, Tensor]

    def at(self, name: str) -> Tensor:
        """What is recorded, at the places that draft."""
        return self.found[name][:, -self.network.config.num_steps :]

    def read(self, states: Tensor) -> Tensor:
        """Logits without a bias, by the target's head or its own."""
        return self.network.own_head(states) if self.network.heads else states @ self.head.T

    def biased(self, states: Tensor, reduced: Tensor | None) -> Tensor:
        """Logits as they are recorded: a selector's are those that it is given."""
        return self.network.bias(self.read(states), None if self.network.selector else reduced)


@pytest.fixture(params=FIXTURES)
def reference(request) -> Reference:
    folder = ROOT / "tests/fixtures" / request.param
    given, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    layer, drafted = given["transformer_layer_config"], given["draft_vocab_size"]
    own = given.get("target_hidden_size") is not None
    config = ShapeConfig(
        kind="block",
        hidden_size=layer["hidden_size"],
        vocab_size=layer["vocab_size"],
        draft_vocab_size=drafted if drafted < layer["vocab_size"] else None,
        feature_layers=given["aux_hidden_state_layer_ids"],
        transformer_layer_config=layer,
        num_layers=layer["num_hidden_layers"],
        num_steps=given["block_size"] - (0 if given["sample_from_anchor"] else 1),
        sample_from_anchor=given["sample_from_anchor"],
        mask_token_id=given["mask_token_id"],
        sliding_window_non_causal=given.get("sliding_window_non_causal", False),
        markov_rank=given.get("selector_rank") or given.get("markov_rank", 0),
        markov_head_type="selector" if "selector_rank" in given else given.get("markov_head_type", "vanilla"),
        selector_top_k=given.get("selector_top_k", 16),
        conv_kernel_size=given.get("conv_kernel_size", 0),
        conv_group_size=given.get("conv_group_size", 16),
        target_hidden_size=given.get("target_hidden_size"),
        own_heads=own,
        own_embeddings=own,
        confidence=given.get("enable_confidence_head", False),
    )
    network = BlockPredictor(config).eval()
    found = load_file(folder / "reference.safetensors")
    if not own:
        weights.pop("embed_tokens.weight", None)
        weights["mask_embedding"] = found["embed_tokens"][given["mask_token_id"]]
    weights = {OURS.get(name, name): weight for name, weight in weights.items()}
    head = found["lm_head"]
    if config.draft_vocab_size is not None:
        assert torch.equal(head[weights.pop("t2d")], weights.pop("lm_head.weight"))
        weights["draft_vocabulary"] = weights.pop("d2t") + torch.arange(drafted)
        head = head[weights["draft_vocabulary"]]
    network.load_state_dict(weights)
    return Reference(network, head, found)


def along(reference: Reference) -> tuple[Tensor, Tensor]:
    """The true tokens x_t..x_{t+S-1} at the anchors, (1, P, S), and their embeddings."""
    places = reference.found["anchors"][:, None] + torch.arange(reference.network.config.num_steps)
    tokens = reference.found["tokens"][0, places][None]
    return tokens, reference.found["embed_tokens"][tokens]


def states(reference: Reference) -> Tensor:
    """Of all anchors at once, as training unrolls them: (1, P, S, H)."""
    network, features, anchors = reference.network, reference.found["features"], reference.found["anchors"][None]
    known = known_at(network, features, features.new_zeros(1, 21, 16), anchors, windows(features, anchors, 1))
    return network.unroll(known, along(reference)[1])


def test_what_training_unrolls_is_the_reference(reference):
    network = reference.network
    tokens, embeddings = along(reference)
    found = states(reference)
    logits = reference.biased(found, network.reduced(tokens, embeddings, found))
    torch.testing.assert_close(logits[0], reference.at("logits"), rtol=1e-5, atol=1e-5)
    if network.config.confidence:
        estimate = network.estimate(states(reference), tokens, embeddings)
        torch.testing.assert_close(estimate[0], reference.at("confidence"), rtol=1e-5, atol=1e-5)


def test_the_target_of_a_step_and_the_loss_are_the_reference(reference):
    """Step n learns the distribution at h_{t+n}. The reference divides by the number of places and not by the sum of
    their weights, a constant factor.
    """
    network, mask = reference.network, reference.at("mask")
    tokens, embeddings = along(reference)
    places = reference.found["anchors"][:, None] + torch.arange(mask.shape[1])
    true = reference.found["states"][0, places] @ reference.head.T
    torch.testing.assert_close(true, reference.at("targets"), rtol=1e-5, atol=1e-5)
    found = states(reference)
    logits = reference.biased(found, network.reduced(tokens, embeddings, found))[0]
    losses = Losses(smooth_l1=0.0, soft_cross_entropy=0.0, kl=0.1, total_variation=0.9, step_decay=math.exp(-1 / 4))
    steps = torch.arange(mask.shape[1]).expand_as(mask)[mask]
    loss, _ = weighted_loss(losses, logits[mask], logits[mask], logits[mask], true[mask], steps)
    if network.config.confidence:
        estimate = network.estimate(states(reference), tokens, embeddings)[0]
        loss = loss + acceptance_loss(losses, estimate[mask], logits[mask], true[mask], steps)
    if network.selector is not None:
        read = network.reduced(tokens, embeddings, found)[0]
        loss = loss + selector_loss(losses, network.selector, read[mask], logits[mask], true[mask], steps)
    scale = (losses.step_decay**steps).sum() / len(steps)
    torch.testing.assert_close(loss * scale, reference.found["loss"], rtol=1e-5, atol=1e-6)


def test_what_decoding_computes_is_the_reference(reference):
    """Position by position into a cache, one root, the path's tokens drafted one after the other."""
    network, found = reference.network, reference.found
    (tokens, embeddings), config = along(reference), network.config
    for number, anchor in enumerate(found["anchors"].tolist()):
        features = F.pad(found["features"][:, :anchor], (0, 0, 1, 0))
        parts = []
        for start, end in ((0, anchor // 2), (anchor // 2, anchor)):
            unread = features.new_zeros(1, end - start + 1, 16)
            parts.append(network.remember(features[:, start : end + 1], unread, torch.arange(start, end)[None]))
        layers = zip(*parts, strict=True)
        memory = [tuple(torch.cat(pair, dim=2) for pair in zip(*layer, strict=True)) for layer in layers]
        ahead = network.rotary_ahead(torch.tensor([[anchor]]), torch.float32, config.num_steps)
        known = Known(features[:, None, -1:], memory, None, ahead)
        carried, beside = network.begin(known, embeddings[:, number, :1]), None
        for n in range(config.num_steps):
            state, carried = network.advance(known, carried, None, n)
            before = tokens[:, number, n : n + 1], embeddings[:, number, n : n + 1]
            read = network.reduced(*before)
            if isinstance(network.token_bias, StateMarkov):
                read, beside = network.token_bias.step(read, state, beside)
            logits = reference.biased(state, read)
            torch.testing.assert_close(logits[0, 0], reference.at("logits")[number, n], rtol=1e-5, atol=1e-5)
            if config.confidence:
                estimate = network.estimate(state, *before)
                torch.testing.assert_close(estimate[0, 0], reference.at("confidence")[number, n], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reference", ["dflash2"], indirect=True)
def test_a_selectors_scores_are_the_reference(reference):
    """Of its candidates, the last of which training replaces where the target's likeliest token is not among them."""
    network, (tokens, embeddings) = reference.network, along(reference)
    found, chosen = states(reference), reference.at("candidates")
    read = network.reduced(tokens, embeddings, found)
    logits = reference.read(found)
    scores = logits[0].gather(-1, chosen) + network.selector.among(read[0], chosen)
    torch.testing.assert_close(scores, reference.at("scores"), rtol=1e-5, atol=1e-5)
    drafted = network.bias(network.before_bias(logits, None), read)[0]
    assert (drafted.isfinite().sum(-1) == network.config.selector_top_k).all()
    torch.testing.assert_close(drafted.gather(-1, chosen)[..., :-1], scores[..., :-1], rtol=1e-5, atol=1e-5)


def test_convolutions_change_nothing_at_first(tiny_target):
    sizes = {"hidden_size": tiny_target.hidden_size, "num_steps": 3, "mask_token_id": 5, "kind": "block"}
    torch.manual_seed(0)
    plain = BlockPredictor(ShapeConfig(**sizes))
    convolved = BlockPredictor(ShapeConfig(**sizes, conv_kernel_size=3))
    convolved.load_state_dict(plain.state_dict(), strict=False)
    for network in (plain, convolved):
        network.complete(tiny_target)
    hidden = torch.randn(1, 6, tiny_target.hidden_size)
    roots = torch.tensor([[2, 5]])
    given, embedding = windows(hidden, roots, 1), tiny_target.embed(torch.tensor([[[3], [4]]]))
    found = [
        network.unroll(known_at(network, hidden, hidden.new_zeros(1, 7, 8), roots, given), embedding, 3)
        for network in (plain, convolved)
    ]
    assert torch.equal(*found)


def test_the_mask_is_the_targets_token_and_forgetting_it_is_loud(tiny_target):
    config = ShapeConfig(kind="block", hidden_size=tiny_target.hidden_size, num_steps=3, mask_token_id=5)
    network = BlockPredictor(config)
    assert network.mask_embedding.isnan().all()
    network.complete(tiny_target)
    assert torch.equal(network.mask_embedding, tiny_target.embed(torch.tensor(5)))
    config.mask_token_id = None
    with pytest.raises(ConfigError, match="mask_token_id is not set"):
        BlockPredictor(config).complete(tiny_target)


def test_own_embeddings_have_the_mask(tiny_target):
    sizes = {"hidden_size": tiny_target.hidden_size, "vocab_size": tiny_target.vocab_size, "num_steps": 3}
    network = BlockPredictor(ShapeConfig(kind="block", mask_token_id=5, own_embeddings=True, **sizes))
    network.adopt(tiny_target)
    torch.testing.assert_close(network.mask, tiny_target.embed(torch.tensor(5)).to(network.dtype))
