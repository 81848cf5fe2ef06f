"""Why a trained drafter accepts little: what may be wrong in how it was loaded or is fed, each tried in turn.

A drafter fed otherwise than in training fails silently: it drafts, and nothing is accepted. Here a suspicion is a
drafter or a prompt with one thing changed, and its evidence is the acceptance length by teacher forcing on the target's
own answers: where one change makes the drafter much better, that was the cause.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shape.data.backends import sampling
from shape.data.conversations import Prompt
from shape.drafters import TrainedDrafter, TreeShape
from shape.errors import DataError
from shape.features.store import Stored
from shape.generation.decoder import ShapeDecoder
from shape.generation.engine import ShapeOutput
from shape.networks.base import Predictor
from shape.networks.decoder import layers_like
from shape.networks.registry import PREDICTORS
from shape.networks.teacher_forcing import teacher_forced
from shape.target.chat import template_of
from shape.target.inference import evaluating
from shape.target.model import Target

_CLEARLY = 0.25  # more tokens a forward than as loaded: neighbouring layers, for example, are all of some use
_LITTLE = 1.6  # a trained drafter with a lower acceptance length does not do what it was trained to do
# How chat templates call what switches reasoning, in words, and the values that it takes.
_ON_OR_OFF = {True: "on", False: "off"}
_THINKING: dict[str, tuple[str, dict[Any, str]]] = {
    "enable_thinking": ("thinking mode", _ON_OR_OFF),
    "thinking": ("thinking mode", _ON_OR_OFF),
    "reasoning_effort": ("reasoning effort", {value: value for value in ("low", "medium", "high")}),
}
_MASK_LIKE = re.compile("mask|pad|unk|reserved", re.IGNORECASE)  # of the tokens that a tokenizer has added
_LOST_IN_DECODING = 0.9  # of the acceptance length by teacher forcing, which decoding has but for rounding


class Suspicion(NamedTuple):
    """A cause, what to do about it, and the drafter or the prompts without it; None where they are as given."""

    cause: str
    remedy: str
    predictor: Predictor | None = None
    prompts: Sequence[Tensor] | None = None


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        decoded, forced: acceptance lengths of chains on the target's own answers, decoded and by teacher forcing.
        tried: by cause, the acceptance length by teacher forcing without it.
        cause, remedy: what fits, and what to do; None where nothing is wrong.
    """

    decoded: float
    forced: float
    tried: Mapping[str, float]
    cause: str | None = None
    remedy: str | None = None


def diagnose(target: Target, predictor: Predictor, prompts: Sequence[Prompt], max_new_tokens: int) -> Diagnosis:
    """Compares a drafter as it was loaded with itself under every suspicion that applies to it.

    Args:
        prompts: of the kind it was trained for; a handful suffices.
    """
    answers, decoded = in_chains(
        target, predictor, [_ids(target, one, one.template) for one in prompts], max_new_tokens
    )
    forced = acceptance(target, predictor, answers)
    tried: dict[str, float] = {}
    remedies: dict[str, str] = {}
    for suspicion in suspicions(target, predictor, prompts):
        asked = suspicion.prompts
        under = answers if asked is None else [_answered(target, ids, max_new_tokens) for ids in asked]
        tried[suspicion.cause] = acceptance(target, suspicion.predictor or predictor, under)
        remedies[suspicion.cause] = suspicion.remedy
    found = Diagnosis(decoded, forced, tried)
    best = max(tried, key=lambda cause: tried[cause], default=None)
    if best is not None and tried[best] > forced + _CLEARLY:
        return replace(found, cause=best, remedy=remedies[best])
    if decoded < _LOST_IN_DECODING * forced:
        return replace(
            found,
            cause="decoding feeds it otherwise than training",
            remedy="report it, with this command and the target's architecture",
        )
    if forced < _LITTLE:
        return replace(
            found,
            cause="a target that was fine-tuned since, or prompts unlike its training data: loaded right, it agrees "
            "seldom",
            remedy="adapt it to this target's own answers: shape train --init CHECKPOINT --target TARGET --data FILE",
        )
    return found


# ---------------------------------------------------------------------------------------------------- what may be wrong


def suspicions(target: Target, predictor: Predictor, prompts: Sequence[Prompt]) -> Iterator[Suspicion]:
    """Every suspicion that applies to a drafter."""
    for each in (_layers, _vocabulary, _rope, _mask_token, _anchor, _dtype):
        yield from each(target, predictor)
    yield from _templates(target, prompts)


def _layers(target: Target, predictor: Predictor) -> Iterator[Suspicion]:
    """Numbers of layers count the embedding as 0 here, and do not in other formats (vLLM 40727)."""
    layers, last = predictor.config.feature_layers, target.config.num_hidden_layers
    for offset, said in ((1, "low"), (-1, "high")):
        other = [layer if layer < 0 else layer + offset for layer in layers]
        if other != layers and all(-1 <= layer <= last for layer in other):
            yield Suspicion(
                f"layer ids one too {said}",
                f"write the layers {other} into its configuration, now {layers}",
                changed(predictor, feature_layers=other),
            )


def _vocabulary(target: Target, predictor: Predictor) -> Iterator[Suspicion]:
    """`d2t` holds target ids less their own index in EAGLE-3, and target ids in other files."""
    vocabulary = predictor.draft_vocabulary
    if vocabulary is None:
        return
    own = torch.arange(len(vocabulary), device=vocabulary.device)
    for ids, said in ((vocabulary + own, "d2t holds differences"), (vocabulary - own, "d2t holds token ids")):
        if len(ids.unique()) == len(ids) and int(ids.min()) >= 0 and int(ids.max()) < target.vocab_size:
            other = changed(predictor)
            other.draft_vocabulary = ids
            yield Suspicion(
                f"{said}, and was read as if not", "convert it anew after rewriting d2t in the other form", other
            )


def _rope(target: Target, predictor: Predictor) -> Iterator[Suspicion]:
    """A drafter's rotary positions are those of its target, unless its files say otherwise, or nothing."""
    layer = predictor.config.transformer_layer_config
    if layer is None:
        return
    own = layer.get("rope_parameters")
    theirs = layers_like(target.config).get("rope_parameters")
    for rope, said in ((theirs, "the target's"), ({"rope_type": "default", "rope_theta": 10000.0}, "Llama's first")):
        if rope is not None and rope != own:
            yield Suspicion(
                f"rope parameters other than in training: {said} fit better",
                f"write rope_parameters {rope} into its configuration, now {own}",
                changed(predictor, transformer_layer_config={**layer, "rope_parameters": rope}),
            )


def _mask_token(target: Target, predictor: Predictor) -> Iterator[Suspicion]:
    own = predictor.config.mask_token_id
    if own is None:
        return
    likely: dict[int, Any] = {target.vocab_size - 1: "the last", 0: "the first"}
    if (tokenizer := target.tokenizer) is not None:  # what trainers take for it (``training.defaults.mask_token``)
        likely |= {len(tokenizer): "the first behind the tokenizer's"}
        special = (tokenizer.mask_token, tokenizer.pad_token, tokenizer.eos_token, tokenizer.unk_token)
        likely |= {tokenizer.convert_tokens_to_ids(token): token for token in special if token is not None}
        likely |= {n: token for n, token in tokenizer.added_tokens_decoder.items() if _MASK_LIKE.search(str(token))}
    for number, token in likely.items():
        if number != own and number < target.vocab_size:  # some tokenizers have added more than the target knows
            other = changed(predictor, mask_token_id=number)
            if isinstance(other.mask_embedding, Tensor):
                other.mask_embedding.fill_(torch.nan)
                other.complete(target)
            yield Suspicion(
                f"the mask token is {number} ({token})",
                f"write mask_token_id {number} into its configuration, now {own}",
                other,
            )


def _anchor(target: Target, predictor: Predictor) -> Iterator[Suspicion]:
    """Whether a block's places draft their own token or the next: defaults differ between speculators and vLLM."""
    config = predictor.config
    other, steps = not config.sample_from_anchor, config.num_steps + (-1 if config.sample_from_anchor else 1)
    if predictor.kind == "block" and steps and config.markov_head_type != "rnn":  # whose state begins at the anchor
        yield Suspicion(
            f"sample_from_anchor is {str(other).lower()}",
            f"write sample_from_anchor {str(other).lower()} into its configuration",
            changed(predictor, sample_from_anchor=other, num_steps=steps),
        )


def _dtype(target: Target, predictor: Predictor) -> Iterator[Suspicion]:
    if predictor.dtype != torch.float32:
        yield Suspicion(
            f"{str(predictor.dtype).removeprefix('torch.')} is too coarse for it",
            "load it in float32, or in bfloat16 where it is float16",
            changed(predictor).float(),
        )


def _templates(target: Target, prompts: Sequence[Prompt]) -> Iterator[Suspicion]:
    """Prompts in the forms that a drafter may have been trained on instead."""
    given = [_ids(target, prompt, prompt.template) for prompt in prompts]
    forms = {"no chat template in training": ("", [target.encode(prompt.turns[0])[0] for prompt in prompts])}
    sources = {template_of(target.tokenizer, prompt.template) for prompt in prompts if target.tokenizer.chat_template}
    for name, (mode, values) in _THINKING.items():
        if not any(re.search(rf"\b{name}\b", source) for source in sources):
            continue
        for value, said in values.items():
            with suppress(DataError):  # a template may know other values
                others = [_ids(target, prompt, {**prompt.template, name: value}) for prompt in prompts]
                forms[f"{mode} {said} in training"] = f".{name} {str(value).lower()}", others
    for cause, (option, others) in forms.items():
        if not all(torch.equal(*pair) for pair in zip(given, others, strict=True)):
            remedy = f"give prompts as in training (--chat_template_kwargs{option}), or train it on yours"
            yield Suspicion(cause, remedy, None, others)


def _ids(target: Target, prompt: Prompt, template: Mapping[str, Any]) -> Tensor:
    return target.encode(prompt.opening, template)[0]


def changed(predictor: Predictor, **options: Any) -> Predictor:
    """The same weights under a configuration that differs in these options."""
    config = type(predictor.config).from_dict({**predictor.config.to_dict(), **options})
    other = PREDICTORS[config.kind](config)
    other.load_state_dict(predictor.state_dict())
    return other.to(predictor.device, predictor.dtype).eval().requires_grad_(False)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- the evidence


@dataclass(frozen=True)
class Answered:
    """Token ids of a prompt and its greedy answer, (T,) int64, and where the answer begins.

    Attributes:
        known: the target's states of it by their layers, as far as somebody has read them.
    """

    ids: Tensor
    start: int
    known: dict[tuple[int, ...], Tensor] = field(default_factory=dict, repr=False)

    def features(self, target: Target, layers: Sequence[int]) -> Tensor:
        """(T, F)."""
        if (which := tuple(layers)) not in self.known:
            self.known[which] = target.features(self.ids[None], layers)[0].cpu()
        return self.known[which]


def acceptance(target: Target, predictor: Predictor, answers: Sequence[Answered]) -> float:
    """Acceptance length of chains as deep as the drafter's steps, by teacher forcing on the target's answers."""
    layers = predictor.config.target_layers
    texts = [
        Stored(one.ids.cpu(), torch.arange(len(one.ids)) >= one.start, one.features(target, layers)) for one in answers
    ]
    with evaluating([predictor]):
        tokens, steps = teacher_forced(predictor, target, texts)
    return tokens / max(steps, 1)


def _answered(target: Target, ids: Tensor, max_new_tokens: int) -> Answered:
    plain = ShapeDecoder(target, graphs=False)  # of one answer: capturing its steps would take longer
    out = plain.generate(ids[None].to(target.device), **sampling(0.0), max_new_tokens=max_new_tokens)
    assert isinstance(out, Tensor)
    return Answered(out[0], len(ids))


def in_chains(
    target: Target, predictor: Predictor, prompts: Sequence[Tensor], max_new_tokens: int
) -> tuple[list[Answered], float]:
    """Greedy answers to prompts, (T,) int64 each, and the acceptance length of the chains that they were decoded with.

    Teacher forcing on the same answers (`acceptance`) gives the same value up to rounding, unless training and decoding
    feed the network differently.
    """
    chain = TreeShape(predictor.config.num_steps, width=1)
    drafter, answers = TrainedDrafter(predictor, chain), []
    emitted = forwards = 0
    with (
        evaluating([predictor]),
        ShapeDecoder(target, drafter, fall_back=False) as decoder,
    ):  # what it captures ends here
        for prompt in prompts:
            ids = prompt[None].to(target.device)
            options: dict[str, Any] = {**sampling(0.0), "max_new_tokens": max_new_tokens}
            out = decoder.generate(ids, torch.ones_like(ids), return_dict_in_generate=True, **options)
            assert isinstance(out, ShapeOutput)
            answers.append(Answered(out.sequences[0], len(prompt)))
            emitted, forwards = emitted + out.stats.emitted, forwards + out.stats.forwards
    return answers, emitted / max(forwards, 1)
