"""The shipped target and predictor: the promise of losslessness on real text, in float32."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from training_runs import extraction_trainer

from shape import bundled
from shape.data.conversations import Conversation
from shape.data.encoding import encode
from shape.data.reading import load_prompts
from shape.drafters import AdversaryDrafter, NgramDrafter, TrainedDrafter, TreeShape
from shape.features.extraction import extract
from shape.features.options import FeatureOptions
from shape.generation.decoder import ShapeDecoder
from shape.networks.shape import ShapePredictor
from shape.networks.teacher_forcing import teacher_forced
from shape.target.chat import Message
from shape.target.model import Target

PROMPTS = 56
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load("quickstart-target", dtype="float32")


@pytest.fixture(scope="module")
def prompts(target) -> list[torch.Tensor]:
    every = load_prompts(bundled.path("data", "bench.jsonl"))
    texts = [
        target.render([{"role": "user", "content": prompt.turns[0]}], add_generation_prompt=True)
        for prompt in every[:: max(1, len(every) // PROMPTS)][:PROMPTS]
    ]
    return [target.tokenizer(text, return_tensors="pt").input_ids[0] for text in texts]


def padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    named = {"input_ids": rows, "attention_mask": [torch.ones_like(row) for row in rows]}
    return {name: pad_sequence(each, batch_first=True, padding_side="left") for name, each in named.items()}


def decoders(target: Target) -> dict[str, ShapeDecoder]:
    return {
        "plain": ShapeDecoder(target),
        "ngram": ShapeDecoder(target, NgramDrafter(), fall_back=False),
        "adversary": ShapeDecoder(target, AdversaryDrafter(nodes=5), fall_back=False),
        "shape tree": ShapeDecoder.from_pretrained("quickstart-shape", target=target, fall_back=False),
        "paper": ShapeDecoder.from_pretrained("quickstart-paper", target=target, fall_back=False),
        "shape chain": ShapeDecoder.from_pretrained(
            "quickstart-shape", target=target, tree=TreeShape(depth=4, width=1)
        ),
    }


def test_teacher_forced_acceptance_from_stored_features_equals_decoded(tmp_path):
    """What training sees in a feature folder is what decoding does, answer for answer, end tokens included."""
    target = Target.load("quickstart-target", dtype="float64")
    predictor = ShapePredictor.from_pretrained(bundled.path("checkpoints", "quickstart-shape")).double()
    chain = TreeShape(depth=predictor.config.num_steps, width=1)
    decoder = ShapeDecoder(target, TrainedDrafter(predictor, chain), fall_back=False)
    answered, decoded = [], []
    for prompt in load_prompts(bundled.path("data", "bench.jsonl"))[::12]:
        question = Message("user", prompt.turns[0])
        text = target.render([{"role": "user", "content": question.content}], add_generation_prompt=True)
        ids = target.tokenizer(text, return_tensors="pt").input_ids
        out = decoder.generate(ids, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True)
        new = out.sequences[0, ids.shape[1] :].tolist()
        finished = new[-1] in target.eos_token_ids
        answer = Message("assistant", target.tokenizer.decode(new[: -1 if finished else None]), finished)
        conversation = Conversation(prompt.id, (question, answer))
        read = encode(conversation, target.tokenizer, None).input_ids
        if torch.equal(read[: out.sequences.shape[1]], out.sequences[0]):
            answered.append(conversation)
            decoded.append((out.stats.emitted, out.stats.forwards))
    assert len(answered) >= 6  # an answer may be cut inside a character, or have other tokens when read again
    trainer = extraction_trainer()
    store = extract(target, answered, tmp_path, FeatureOptions(shard_size=3), trainer)
    assert store.manifest.dtype == "float64"
    assert [teacher_forced(predictor, target, [stored]) for stored in store] == decoded
    assert sum(emitted for emitted, _ in decoded) > 2 * sum(forwards for _, forwards in decoded)


def test_eos_aware_answers_do_not_end_at_once(target):
    """An answer begun as if it were complete: the target ends it with its first token, unless that is ruled out."""
    text = "<|im_start|>user\nThanks, bye.<|im_end|>\n<|im_start|>assistant\nGoodbye!"
    ids = target.tokenizer(text, return_tensors="pt").input_ids
    for decoder in decoders(target).values():
        at_once = decoder.generate(ids, max_new_tokens=16)[0, ids.shape[1] :].tolist()
        assert at_once == target.eos_token_ids
        later = decoder.generate(ids, max_new_tokens=16, eos_aware=True)
        assert later.shape[1] >= ids.shape[1] + 4
        assert torch.equal(later, target.model.generate(ids, max_new_tokens=16, min_new_tokens=4, do_sample=False))


@pytest.mark.slow
def test_greedy_equals_transformers_token_for_token(target, prompts):
    assert len(prompts) >= 50
    expected = [target.model.generate(row[None], max_new_tokens=NEW_TOKENS, do_sample=False)[0] for row in prompts]
    for name, decoder in decoders(target).items():
        if name != "adversary":  # slower than plain; its batches below are enough
            for row, tokens in zip(prompts, expected, strict=True):
                assert torch.equal(decoder.generate(row[None], max_new_tokens=NEW_TOKENS)[0], tokens), name
        for start in range(0, len(prompts), 7):
            rows = prompts[start : start + 7]
            batch = padded(rows)
            out = decoder.generate(**batch, max_new_tokens=NEW_TOKENS)[:, batch["input_ids"].shape[1] :]
            for row, tokens, found in zip(rows, expected[start:], out, strict=False):
                answer = tokens[len(row) :]
                assert torch.equal(found[: len(answer)], answer), name


def test_one_batch_of_unequal_lengths(target, prompts):
    """The fast part of the above: one batch, every drafter, greedy and sampled."""
    batch = padded(prompts[:5])
    greedy = target.model.generate(**batch, max_new_tokens=24, do_sample=False)
    sampled = None
    for name, decoder in decoders(target).items():
        assert torch.equal(decoder.generate(**batch, max_new_tokens=24), greedy), name
        out = decoder.generate(**batch, max_new_tokens=24, do_sample=True, top_k=0, seed=3)
        sampled = out if sampled is None else sampled
        assert torch.equal(out, sampled), name


@pytest.mark.parametrize(("name", "least"), [("quickstart-shape", 4.0), ("quickstart-paper", 3.0)])
def test_what_ships_saves_forwards(target, prompts, name, least):
    """Their cards say 5.58 (at least 5.24) and 3.68 (at least 3.50), over whole answers to more prompts."""
    decoder = ShapeDecoder.from_pretrained(name, target=target, fall_back=False)
    out = decoder.generate(**padded(prompts[::7]), max_new_tokens=NEW_TOKENS, return_dict_in_generate=True)
    assert out.stats.acceptance_length > least


@torch.no_grad()
def test_the_papers_predictor_refines_by_transport(target, prompts):
    """It ships with the refinement on, which turns the states that it predicts, if by a few degrees."""
    predictor = ShapePredictor.from_pretrained(bundled.path("checkpoints", "quickstart-paper")).eval()
    assert predictor.config.refinement == "sinkhorn" and predictor.config.refinement_last_update == "row"
    states = target.model(prompts[0][None], output_hidden_states=True).hidden_states[-1]
    window = states[:, -predictor.config.window :]
    refined = predictor(window)
    predictor.refinement = None
    assert torch.cosine_similarity(refined, predictor(window), dim=-1).max() < 0.995
