"""The doctor: every cause is planted in a drafter that had learned its target's answers by heart, and named."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import tiny_config, with_chat_template
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from shape.data.conversations import Prompt
from shape.drafters import TrainedDrafter
from shape.evaluation.doctor import Diagnosis, _mask_token, _templates, changed, diagnose
from shape.networks.base import Predictor
from shape.networks.config import ShapeConfig
from shape.networks.registry import PREDICTORS
from shape.networks.teacher_forcing import Reader, Texts, examples, known_in
from shape.target.chat import Message
from shape.target.model import Target

update = TrainedDrafter.update
QUESTIONS = ("Hello!", "What is it?", "Why so?", "And when?")
LONGEST = 24
EAGLE = {"kind": "eagle", "feature_layers": [0, 1], "own_heads": True, "intermediate_size": 96}
BLOCK = {"kind": "block", "feature_layers": [0, 1], "intermediate_size": 96, "own_heads": True, "mask_token_id": 0,
         "num_layers": 2}  # fmt: skip
NETWORKS = {
    "eagle": EAGLE,
    "block": BLOCK,
    "shape": {"step_mode": "recursive", "token_conditioning": "path", "intermediate_size": 96},
}


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return [Prompt(text, "test", (text,), (Message("user", text),)) for text in QUESTIONS]


@pytest.fixture(scope="module")
def learned(tiny_target, prompts) -> dict[str, Predictor]:
    """Drafters that know what the target answers."""
    return {name: by_heart(tiny_target, prompts, **options) for name, options in NETWORKS.items()}


def by_heart(target: Target, prompts: list[Prompt], vocabulary: torch.Tensor | None = None, **options) -> Predictor:
    texts = []
    for prompt in prompts:
        ids = target.encode(prompt.opening, prompt.template)
        answer = target.model.generate(ids, do_sample=False, max_new_tokens=LONGEST)[0]
        texts.append((answer, torch.arange(len(answer)) >= ids.shape[1]))
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "num_steps": 4}
    config = ShapeConfig(**sizes, draft_vocab_size=None if vocabulary is None else len(vocabulary), **options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = PREDICTORS[config.kind](config)
    network.draft_vocabulary = vocabulary
    network.adopt(target)
    hidden = [target.features(answer[None], config.target_layers)[0] for answer, _ in texts]
    whole = Texts.whole(pad_sequence(hidden, batch_first=True), *zip(*texts, strict=True))
    cut = examples(whole, config.window, config.num_steps, target.hidden_size, config.feature_size)
    following = whole.roots[..., None] + 1 + torch.arange(config.num_steps)
    wanted = whole.input_ids[torch.arange(len(texts))[:, None, None], following.clamp(max=whole.input_ids.shape[1] - 1)]
    numbers = torch.full((target.vocab_size,), -100)
    drafted = torch.arange(target.vocab_size) if vocabulary is None else vocabulary
    numbers[drafted] = torch.arange(len(drafted))
    embeddings, reader = target.embed(cut.tokens), Reader(network, target)
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    for _ in range(100):
        states = network.unroll(known_in(network, target, whole, cut.window), embeddings)
        loss = F.cross_entropy(reader(states, cut.tokens, embeddings)[cut.mask], numbers[wanted[cut.mask]])
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


@pytest.mark.parametrize(
    ("trained", "read", "cause"),
    [([0, 1], [1, 2], "layer ids one too high"), ([1, 2], [0, 1], "layer ids one too low")],
)
def test_layers_off_by_one(tiny_target, prompts, trained, read, cause):
    network = by_heart(tiny_target, prompts, **{**EAGLE, "feature_layers": trained})
    found = examine(tiny_target, changed(network, feature_layers=read), prompts)
    assert found.cause == cause and str(trained) in str(found.remedy)


@pytest.mark.parametrize(("sign", "cause"), [(1, "d2t holds token ids"), (-1, "d2t holds differences")])
def test_draft_vocabulary_in_the_other_form(tiny_target, prompts, sign, cause):
    """Ids that were taken for differences, and differences that were taken for ids."""
    vocabulary = 1 + torch.arange(tiny_target.vocab_size // 2)
    own = torch.arange(len(vocabulary))
    network = by_heart(tiny_target, prompts, vocabulary, **EAGLE)
    network.draft_vocabulary = vocabulary + sign * own
    found = examine(tiny_target, network, prompts)
    assert found.cause is not None and found.cause.startswith(cause), found


def test_rope(tiny_target, learned, prompts):
    layer = learned["eagle"].config.transformer_layer_config
    other = {**layer, "rope_parameters": {"rope_type": "default", "rope_theta": 2.0}}
    found = examine(tiny_target, changed(learned["eagle"], transformer_layer_config=other), prompts)
    assert found.cause is not None and found.cause.startswith("rope parameters other than in training"), found


def test_mask_token(tiny_target, learned, prompts):
    network = changed(learned["block"], mask_token_id=77)
    network.mask_embedding.copy_(tiny_target.embed(torch.tensor(77)))
    found = examine(tiny_target, network, prompts)
    assert found.cause is not None and found.cause.startswith("the mask token is 0"), found


def test_few_tokens_are_tried_as_masks(tiny_target, learned):
    """Those that trainers take, and of what a tokenizer has added, which may be more than the target knows."""
    target, network = copy.copy(tiny_target), learned["block"]
    target.tokenizer = copy.deepcopy(tiny_target.tokenizer)
    target.tokenizer.add_tokens([f"<|special_{number}|>" for number in range(9)] + ["<|reserved|>"])
    tried = {int(suspicion.cause.split()[4]) for suspicion in _mask_token(target, network)}
    known = {tiny_target.vocab_size - 1, 0, *(target.tokenizer.pad_token_id, target.tokenizer.eos_token_id)}
    reserved = target.tokenizer.convert_tokens_to_ids("<|reserved|>")
    likely = {number for number in (*known, reserved) if number is not None and number < tiny_target.vocab_size}
    assert likely - {network.config.mask_token_id} <= tried and len(tried) <= 8
    assert max(tried) < tiny_target.vocab_size


@pytest.mark.parametrize("anchor", [True, False])
def test_anchor_convention(tiny_target, prompts, anchor):
    network = by_heart(tiny_target, prompts, **BLOCK, sample_from_anchor=anchor)
    steps = 4 + 1 if not anchor else 4 - 1
    planted = changed(network, sample_from_anchor=not anchor, num_steps=steps)
    assert planted.config.block_size == network.config.block_size
    found = examine(tiny_target, planted, prompts)
    assert found.cause == f"sample_from_anchor is {str(anchor).lower()}", found


@pytest.mark.parametrize("options", [{"markov_head_type": "rnn", "markov_rank": 4}, {"num_steps": 1}])
def test_predictors_without_another_convention_are_examined_too(tiny_target, prompts, options):
    sizes = {"hidden_size": tiny_target.hidden_size, "vocab_size": tiny_target.vocab_size, "num_steps": 4}
    network = PREDICTORS["block"](ShapeConfig(**{**sizes, **BLOCK, "sample_from_anchor": True, **options})).eval()
    network.adopt(tiny_target)
    assert "anchor" not in str(examine(tiny_target, network, prompts).cause)


def test_dtype(tiny_target, prompts):
    """States that float16 cannot hold: the norm behind them hides their size in wider formats."""
    network = by_heart(tiny_target, prompts, **EAGLE, norm_before_residual=True)
    network.fc.weight.mul_(5e4)
    assert examine(tiny_target, network, prompts).cause is None
    found = examine(tiny_target, network.half(), prompts)
    assert found.cause == "float16 is too coarse for it", found


def test_thinking_mode(tiny_tokenizer):
    """Trained without a thought, asked with one."""
    tokenizer = with_chat_template(tiny_tokenizer, "qwen3")
    model = AutoModelForCausalLM.from_config(tiny_config("llama", len(tokenizer)))
    target = Target(model.eval(), tokenizer, name="thinking")

    def asked(**template) -> list[Prompt]:
        return [Prompt(text, "test", (text,), (Message("user", text),), template) for text in QUESTIONS]

    network = by_heart(target, asked(enable_thinking=False), **EAGLE)
    assert examine(target, network, asked(enable_thinking=False)).cause is None
    found = examine(target, network, asked())
    assert found.cause == "thinking mode off in training", found


GRANITE = "{% if thinking %}Think! {% endif %}{{ messages[0].content }}!"
PICKY = (
    "{% if reasoning_effort is defined and reasoning_effort != 'high' %}{{ raise_exception('none or high') }}"
    "{% endif %}{{ reasoning_effort }} {{ messages[0].content }}"
)


@pytest.mark.parametrize(
    ("template", "causes"),
    [
        ("{{ messages[0].content }}!", []),
        (GRANITE, ["thinking mode on"]),
        ("gpt-oss", ["reasoning effort low", "reasoning effort high"]),  # medium is how it asks
        (PICKY, ["reasoning effort high"]),
    ],
    ids=["none", "thinking", "reasoning_effort", "other values"],
)
def test_only_what_the_template_reads_is_tried(tiny_target, prompts, template, causes):
    if template == "gpt-oss":
        tokenizer = with_chat_template(tiny_target.tokenizer, template)
    else:
        tokenizer = copy.copy(tiny_target.tokenizer)
        tokenizer.chat_template = template
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody has given what it does not read
        found = [one.cause for one in _templates(Target(tiny_target.model, tokenizer, name="other"), prompts)]
    assert found == [f"{cause} in training" for cause in ["no chat template", *causes]]


def test_no_chat_template(tiny_target, prompts):
    bare = [Prompt(p.id, p.category, p.turns, p.messages) for p in prompts]
    plain = Target(tiny_target.model, copy.copy(tiny_target.tokenizer), name="plain")
    plain.tokenizer.chat_template = None
    network = by_heart(plain, bare, **EAGLE)
    found = examine(tiny_target, network, prompts)
    assert found.cause == "no chat template in training", found


def test_a_target_that_was_tuned_since(tiny_target, learned, prompts):
    model = copy.deepcopy(tiny_target.model)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    found = examine(Target(model, tiny_target.tokenizer, name="tuned"), learned["eagle"], prompts)
    assert found.cause is not None and "fine-tuned since" in found.cause and "--init" in str(found.remedy), found


def test_decoding_that_feeds_otherwise_than_training(tiny_target, learned, prompts, monkeypatch):
    monkeypatch.setattr(
        TrainedDrafter, "update", lambda self, tokens, hidden, counts: update(self, tokens, 0 * hidden, counts)
    )
    found = examine(tiny_target, learned["eagle"], prompts)
    assert found.cause is not None and found.cause.startswith("decoding feeds it"), found
