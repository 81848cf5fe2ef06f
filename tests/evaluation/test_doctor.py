"""The doctor: every cause is planted in a drafter that had learned its target's answers by heart, and named."""

import pytest
import torch
import torch.nn.functional as F

from shape.data.conversations import Prompt
from shape.drafters import PREDICTORS
from shape.evaluation.doctor import Diagnosis, acceptance, changed, diagnose, in_chains
from shape.features.store import Stored
from shape.networks.base import Predictor
from shape.networks.config import ShapeConfig
from shape.networks.teacher_forcing import Reader, Texts, examples, known_in
from shape.target.chat import Message
from shape.target.model import Target

QUESTIONS = ("Hello!", "What is it?", "Why so?", "And when?")
LONGEST = 24
NETWORKS = {
    "eagle": {
        "kind": "eagle", "feature_layers": [0, 1], "own_heads": True, "draft_vocab_size": 250, "intermediate_size": 96,
        "transformer_layer_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    },
    "shape": {"step_mode": "recursive", "token_conditioning": "path", "draft_vocab_size": 250, "intermediate_size": 96},
}  # fmt: skip


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return [Prompt(text, "test", (text,), (Message("user", text),)) for text in QUESTIONS]


@pytest.fixture(scope="module")
def learned(tiny_target, prompts) -> dict[str, Predictor]:
    """Drafters that know what the target answers."""
    return {name: by_heart(tiny_target, prompts, **options) for name, options in NETWORKS.items()}


def by_heart(target: Target, prompts: list[Prompt], steps: int = 150, **options) -> Predictor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = ShapeConfig(hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_steps=4, **options)
        network = PREDICTORS[config.kind](config)
    if config.draft_vocab_size is not None:  # away from 0, 1, 2, ..., where differences and ids are the same
        network.draft_vocabulary = torch.arange(target.vocab_size)[-config.draft_vocab_size :]
    texts = []
    for prompt in prompts:
        ids = target.encode(prompt.opening)
        answer = target.model.generate(ids, do_sample=False, max_new_tokens=LONGEST)
        features = target.features(answer, config.target_layers)[0]
        texts.append(Stored(answer[0], torch.arange(answer.shape[1]) >= ids.shape[1], features))
    padded = torch.nn.utils.rnn.pad_sequence([text.hidden for text in texts], batch_first=True)
    whole = Texts.whole(padded, [text.input_ids for text in texts], [text.loss_mask for text in texts])
    cut = examples(whole, config.window, config.num_steps, target.hidden_size, config.feature_size)
    optimizer, reader = torch.optim.AdamW(network.parameters(), lr=5e-3), Reader(network, target)
    embeddings = target.embed(cut.tokens)
    following = whole.input_ids[
        torch.arange(len(texts))[:, None, None],
        (whole.roots[..., None] + 1 + torch.arange(config.num_steps)).clamp(max=whole.input_ids.shape[1] - 1),
    ]
    numbers = torch.full((target.vocab_size,), -100)
    vocabulary = network.draft_vocabulary
    drafted = torch.arange(target.vocab_size) if vocabulary is None else vocabulary
    numbers[drafted] = torch.arange(len(drafted))
    for _ in range(steps):
        states = network.unroll(known_in(network, target, whole, cut.window), embeddings)
        loss = F.cross_entropy(reader(states, embeddings)[cut.mask], numbers[following[cut.mask]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval().requires_grad_(False)


def examine(target: Target, network: Predictor, prompts: list[Prompt]) -> Diagnosis:
    return diagnose(target, network, prompts, LONGEST)


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_drafter_fed_as_in_training_is_well(tiny_target, learned, prompts, kind):
    found = examine(tiny_target, learned[kind], prompts)
    assert found.forced > 2.0 and found.decoded == pytest.approx(found.forced)
    assert found.cause is None and found.remedy is None and found.tried


def test_draft_vocabulary_in_the_other_form(tiny_target, learned, prompts):
    network = learned["shape"]
    planted = changed(network)
    planted.draft_vocabulary = network.draft_vocabulary - torch.arange(250)  # as if ids were differences
    if int(planted.draft_vocabulary.min()) < 0:
        planted.draft_vocabulary = planted.draft_vocabulary.clamp(min=0)
    found = examine(tiny_target, planted, prompts)
    assert found.cause is not None and "d2t" in found.cause, found
