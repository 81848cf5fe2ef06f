"""What predictors are trained on: by its definition, and the same as decoding reads."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import OPTIONS, STEPS, WINDOW, fit, network

from shape.drafters import TrainedDrafter, TreeShape
from shape.features.positions import eligible
from shape.features.store import Stored
from shape.generation.decoder import ShapeDecoder
from shape.networks.shape import windows
from shape.networks.teacher_forcing import Reader, Texts, examples, teacher_forced
from shape.training.losses import supervised
from shape.training.options import Losses


def naive(hidden, tokens, mask, root, window, steps):
    """The definition, position by position."""
    length = len(tokens)
    before = [hidden[i] if i >= 0 else torch.zeros_like(hidden[0]) for i in range(root - window, root)]
    supervised = []
    for n in range(steps):
        known = root >= 1 and mask[root] and root + n + 1 < length
        supervised.append(bool(known and mask[root + 1 : root + n + 2].all()))
    return torch.stack(before), supervised


@given(data=st.data())
@settings(max_examples=60)
def test_examples_equal_their_definition(data):
    length = data.draw(st.integers(2, 14))
    window, steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    hidden, tokens = torch.randn(1, length, 6), torch.randint(0, 9, (1, length))
    roots = torch.arange(length)[None]
    cut = examples(Texts(hidden, tokens, mask[None], roots), window, steps, hidden_size=2)
    for root in range(length):
        before, supervised = naive(hidden[0], tokens[0], mask, root, window, steps)
        assert torch.equal(cut.window[0, root], before)
        assert cut.mask[0, root].tolist() == supervised
        for n in [n for n in range(steps) if supervised[n]]:
            assert cut.tokens[0, root, n] == tokens[0, root + n]
            assert torch.equal(cut.states[0, root, n], hidden[0, root + n, -2:])
    ready = eligible(mask, torch.tensor([0, length]))
    assert torch.equal(ready, cut.mask[0, :, 0])


def test_windows_are_those_of_the_decoder(store):
    """The drafter's first window: `lengths - 1` ends, where the root's position is `lengths - 1`."""
    stored = store[1]
    root = 25
    around = store.gather(store.offsets[1][None] + root, WINDOW, STEPS)
    decoder_window = windows(stored.hidden[None, :root], torch.tensor([[root]]), WINDOW)[0, 0]
    assert torch.equal(around.hidden[0, :WINDOW], decoder_window)


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"step_mode": "parallel", "token_conditioning": "none"},
        {"step_mode": "parallel", "token_conditioning": "root"},
        {"step_mode": "recursive", "token_conditioning": "none"},
        {"step_mode": "recursive", "token_conditioning": "root", "attention": True},
        {"step_mode": "parallel", "token_conditioning": "root", "markov_rank": 8},
        {"attention": True, "feature_layers": [1, -1], "draft_vocab_size": 200},
        {"kind": "medusa", "own_heads": True, "draft_vocab_size": 200},
        {"kind": "eagle", "feature_layers": [1, 2, -1]},
        {"kind": "eagle", "own_heads": True, "draft_vocab_size": 200},
        {"kind": "eagle", "num_layers": 2, "feature_layers": [1, -1]},
        {"kind": "peagle", "num_layers": 2, "own_heads": True, "own_embeddings": True, "mask_token_id": 7},
        {"kind": "eagle", "num_layers": 2, "transformer_layer_config": WINDOWS},
        {"kind": "peagle", "num_layers": 2, "mask_token_id": 7, "transformer_layer_config": WINDOWS},
        {"kind": "block", "num_layers": 2, "feature_layers": [1, 2], "mask_token_id": 7},
        {
            "kind": "block",
            "num_layers": 2,
            "mask_token_id": 7,
            "transformer_layer_config": {**WINDOWS, "model_type": "qwen3"},
        },
        {"kind": "block", "feature_layers": [0, -1], "markov_rank": 8, "confidence": True, "mask_token_id": 7},
        {"kind": "block", "markov_rank": 8, "draft_vocab_size": 200, "sample_from_anchor": True, "mask_token_id": 7},
    ],
)
def test_teacher_forced_acceptance_equals_decoded(store, tiny_target, axes):
    """Windows, tokens and targets of training are those of decoding: chains accept the same tokens."""
    losses = Losses(smooth_l1=0.0)
    predictor = fit(tiny_target, store, losses=losses, options=replace(OPTIONS, steps=60, batch_size=32), **axes)
    predictor = predictor.predictor.eval()
    decoder = ShapeDecoder(tiny_target, TrainedDrafter(predictor, TreeShape(depth=STEPS, width=1)), fall_back=False)
    accepted_any = False
    for stored in list(store)[:4]:
        prompt = stored.input_ids[:20]
        out = decoder.generate(
            prompt[None], do_sample=False, max_new_tokens=40, eos_token_id=[], return_dict_in_generate=True
        )
        text = out.sequences[0]
        mask = torch.arange(len(text)) >= len(prompt)
        features = tiny_target.features(text[None], predictor.config.target_layers)[0]
        forced = teacher_forced(predictor, tiny_target, [Stored(text, mask, features)])
        assert forced == (out.stats.emitted, out.stats.forwards)
        accepted_any |= out.stats.emitted > out.stats.forwards
    assert accepted_any


@pytest.mark.parametrize(
    "axes",
    [
        {"draft_vocab_size": 200},
        {"step_mode": "parallel", "token_conditioning": "root", "markov_rank": 8},
        {"step_mode": "parallel", "token_conditioning": "root", "markov_rank": 8, "coupling": 4},
        {"kind": "medusa", "own_heads": True},
        {"kind": "eagle", "own_heads": True},
    ],
)
def test_logits_of_supervised_steps_are_those_of_all_steps(tiny_target, axes):
    predictor = network(tiny_target, **axes)
    generator = torch.Generator().manual_seed(0)
    for parameter in predictor.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    if predictor.draft_vocabulary is not None:
        predictor.draft_vocabulary = torch.arange(len(predictor.draft_vocabulary))
    states, embeddings = torch.randn(2, 2, 5, STEPS, tiny_target.hidden_size, generator=generator)
    kept = supervised(torch.rand(2, 5, STEPS, generator=generator) < 0.6)
    reader = Reader(predictor, tiny_target)
    tokens = torch.randint(tiny_target.vocab_size, (2, 5, STEPS), generator=generator)
    along = tokens, embeddings
    found = reader.at(kept, states, predictor.reduced(*along), reader.reduced_vocabulary())
    torch.testing.assert_close(found, reader(states, *along)[kept])
