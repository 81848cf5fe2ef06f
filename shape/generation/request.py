"""What a call of ``generate`` asks for, as transformers itself understands it.

transformers prepares each call: precedence of options, logits processors, stopping criteria. ``custom_generate`` lets
us stop behind that preparation and take what it made, so that options mean here what they mean there.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from shape.data.backends import in_words
from shape.errors import UnsupportedGeneration
from shape.generation import served
from shape.generation.prompts import mask_of, prompts_of, seen_prompts, width_of
from shape.generation.rules import Rule
from shape.generation.sequence import SequenceState, StopCriteria
from shape.target.model import Target
from shape.target.support import CACHE_NAMES
from shape.verification.noise import sequence_keys
from shape.verification.sampling import Sampler

# One number, or one per prompt; also numpy's and torch's.
Seed = int | Sequence[int] | np.integer | np.ndarray | Tensor
# These compute on the scores' device alone; others may ask the host.
ON_DEVICE = (
    TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper, TypicalLogitsWarper,
    EpsilonLogitsWarper, LogitNormalization,
)  # fmt: skip
# These look at the scores of a token alone; all others may look at the text before it.
_SCORES_ALONE = (
    *ON_DEVICE, TopHLogitsWarper, EtaLogitsWarper, SuppressTokensLogitsProcessor, InfNanRemoveLogitsProcessor,
)  # fmt: skip
# Carried out here, for sequences of unequal length. Each stands for an option, whose name its attribute has too.
_OURS = {
    MinLengthLogitsProcessor: "min_length",
    MinNewTokensLengthLogitsProcessor: "min_new_tokens",
    MaxLengthCriteria: "max_length",
    EosTokenCriteria: "eos_token_id",
}


class Prepared(NamedTuple):
    """What transformers makes of the options for one prompt."""

    config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList

    @property
    def processors_look_back(self) -> bool:
        """Whether any processor depends on the text before a token."""
        return any(type(one) not in _SCORES_ALONE for one in _others(self.processors))

    @property
    def looks_back(self) -> bool:
        """Whether anything here depends on the text before a token, and so on the sequence."""
        return self.processors_look_back or bool(_others(self.criteria))

    def refuse_own(self) -> None:
        """Raises for what a caller's processor or criterion says of lengths and end tokens otherwise than the options,
        which are carried out here.
        """
        for one in (*self.processors, *self.criteria):
            if (option := _OURS.get(type(one))) is None:
                continue
            ends = getattr(one, "eos_token_id", None)
            same_ends = ends is None or sorted(ends.flatten().tolist()) == sorted(_end_tokens(self.config))
            if not same_ends or (option != "eos_token_id" and getattr(one, option) != getattr(self.config, option)):
                raise UnsupportedGeneration(
                    f"{type(one).__name__} in logits_processor or stopping_criteria is not carried out here; say what "
                    f"it says by the option {option}"
                )

    def processors_of(self, seen: list[int], prompt: list[int]) -> LogitsProcessorList:
        """Those that are not carried out here, for a prompt that they see with its padding."""
        others = LogitsProcessorList(_others(self.processors))

        def padded(ids: Tensor, scores: Tensor) -> Tensor:
            whole: Any = torch.cat([ids.new_tensor([seen]), ids[:, len(prompt) :]], dim=1)
            return others(whole, scores)  # type: ignore[arg-type]  # they name a type that no tensor has

        return others if seen == prompt else LogitsProcessorList([padded])


@dataclass(frozen=True)
class Request:
    """One call, with an entry per sequence where these differ. A prompt's samples are adjacent.

    Attributes:
        prompts: token ids of every sequence, without padding.
        samples: sequences per prompt.
        warpers, processors: see ``Sampler``.
        criteria: per sequence, reasons to stop beside length and end tokens; None where there are none.
        slow: see ``served.slow_by_itself``.

    Processors and criteria see the text of a prompt alone as it was given, padding included, as in transformers; that
    of one of several without padding, so that each gets what it gets alone.
    """

    prompts: list[list[int]]
    samples: int
    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    warpers: tuple[LogitsProcessor, ...]
    processors: list[LogitsProcessorList] | None
    criteria: list[StopCriteria] | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    device: torch.device
    slow: Mapping[str, Any]

    @classmethod
    def resolve(
        cls,
        target: Target,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        generation_config: GenerationConfig | None,
        options: dict[str, Any],
    ) -> "Request":
        """Options by name go before `generation_config`, that before the target's own.

        Raises:
            UnsupportedGeneration: anything that cannot be served, in one sentence.
        """
        options = dict(options)
        positions = options.pop("position_ids", None)
        call = _resolve_options(target, generation_config, options, input_ids)
        first = call.prepared
        mask = mask_of(input_ids, attention_mask, call.pad_token_id, _end_tokens(first.config))
        prompts = prompts_of(target, input_ids, mask, positions)
        new = _new_tokens(target, first.config, call.width, max(map(len, prompts)))
        samples = first.config.num_return_sequences or 1
        each, seen = [first], prompts
        if first.looks_back:
            seen = seen_prompts(target, input_ids, prompts)
            there = mask.tolist() if len(seen) == 1 else [None] * len(seen)
            more = {"max_new_tokens": new}
            each = [
                _prepare(target, text, here, call.config, {**call.options, **more, **_for_row(call.options, row)})
                for row, (text, here) in enumerate(zip(seen, there, strict=True))
            ]
        slow = served.slow_by_itself(target, first.config, options)
        return cls._of(target, prompts, samples, call.width, new, first, each, seen, slow)

    @classmethod
    def of_prepared(cls, target: Target, input_ids: Tensor, inputs: Mapping[str, Any], prepared: Prepared) -> "Request":
        """The call that transformers has prepared itself, for `generate(custom_generate=...)`.

        Args:
            input_ids: (B * samples, L) int64, each prompt once for every sample; so are inputs.
            inputs: what else the model would be given at first, the caller's and what transformers has added.

        Raises:
            UnsupportedGeneration: as ``resolve``; it does not look at what transformers has added.
        """
        config, width = prepared.config, width_of(input_ids)
        samples = config.num_return_sequences or 1
        given = served.without_none(config.to_dict()) | served.without_none(inputs)
        positions, mask = (
            None if rows is None else rows[..., ::samples, :]
            for rows in (given.pop("position_ids", None), given.pop("attention_mask", None))
        )
        for name in CACHE_NAMES:
            if not getattr(given.get(name), "_is_user_defined", False):
                given.pop(name, None)
        served.refuse(target, given)
        prepared.refuse_own()
        input_ids = input_ids[::samples]
        prompts = prompts_of(target, input_ids, mask_of(input_ids, mask, None, ()), positions)
        slow = served.slow_by_itself(target, config, {})
        if len(prompts) * samples > 1 and prepared.looks_back:
            own = f" (the generation_config of target {target.name} has {in_words(slow)})" if slow else ""
            raise UnsupportedGeneration(
                f"options that look at the text so far{own} were prepared for the batch with its padding; give one "
                "prompt at a time and ask for one sample, or call ShapeDecoder.generate"
            )
        new = _new_tokens(target, config, width, max(map(len, prompts)))
        seen = seen_prompts(target, input_ids, prompts) if prepared.looks_back else prompts
        return cls._of(target, prompts, samples, width, new, prepared, [prepared], seen, slow)

    @classmethod
    def _of(
        cls,
        target: Target,
        prompts: list[list[int]],
        samples: int,
        width: int,
        new: int,
        shared: Prepared,
        each: list[Prepared],
        seen: list[list[int]],
        slow: Mapping[str, Any],
    ) -> "Request":
        config, eos, device = shared.config, _end_tokens(shared.config), target.device
        pad = config._pad_token_tensor
        processors = criteria = None
        if shared.processors_look_back:
            processors = [
                own.processors_of(text, prompt)
                for own, text, prompt in zip(each, seen, prompts, strict=True)
                for _ in range(samples)
            ]
        if _others(shared.criteria):
            criteria = [
                StopCriteria(StoppingCriteriaList(_others(own.criteria)), torch.tensor([text], device=device))
                for own, text in zip(each, seen, strict=True)
                for _ in range(samples)
            ]
        return cls(
            prompts=[prompt for prompt in prompts for _ in range(samples)],
            samples=samples,
            max_new_tokens=new,
            min_new_tokens=max(config.min_new_tokens or 0, (config.min_length or 0) - width),
            temperature=(1.0 if config.temperature is None else float(config.temperature)) if config.do_sample else 0.0,
            warpers=() if processors else tuple(_others(shared.processors)),
            processors=processors,
            criteria=criteria,
            eos_token_ids=eos,
            pad_token_id=int(pad) if pad is not None else (eos[0] if eos else 0),
            device=device,
            slow=slow,
        )

    def keys(self, seed: Seed | None) -> Tensor | None:
        """Keys of the sequences' noise; None when greedy.

        Raises:
            UnsupportedGeneration: a seed that is no integer, or not one per prompt.
        """
        numbers = None if seed is None else _integers(seed)
        if self.temperature == 0.0:
            return None
        rows = len(self.prompts) // self.samples
        if numbers is None:
            numbers = int(torch.randint(2**62, ()))
        elif not isinstance(numbers, int) and len(numbers) != rows:
            raise UnsupportedGeneration(
                f"{len(numbers)} seeds are given for {rows} prompts; give one, or one per prompt"
            )
        return sequence_keys(numbers, rows, self.samples, self.device)

    def sequences(self, indices: list[int]) -> list[SequenceState]:
        """Some sequences, with nothing emitted yet."""
        return [
            SequenceState(
                index,
                self.prompts[index],
                self.max_new_tokens,
                self.eos_token_ids,
                None if self.criteria is None else self.criteria[index],
            )
            for index in indices
        ]

    def sampler(self, rows: list[int], keys: Tensor | None, rule: Rule) -> Sampler:
        """The sampler of some sequences."""
        return Sampler(
            prompt_lengths=torch.tensor([len(self.prompts[row]) for row in rows], device=self.device),
            temperature=self.temperature,
            keys=None if keys is None else keys[rows],
            warpers=self.warpers,
            processors=None if self.processors is None else tuple(self.processors[row] for row in rows),
            min_new_tokens=self.min_new_tokens,
            eos_token_ids=self.eos_token_ids,
            max_new_tokens=self.max_new_tokens,
            coupled=rule.coupled,
            one_drawn=rule.one_drawn,
        )

    def assemble(self, input_ids: Tensor, new: list[list[int]]) -> Tensor:
        """Prompts as they were given, followed by new tokens, padded on the right."""
        longest = max(map(len, new))
        padded = [tokens + [self.pad_token_id] * (longest - len(tokens)) for tokens in new]
        prompts = input_ids.repeat_interleave(self.samples, dim=0)
        return torch.cat([prompts, torch.tensor(padded, device=input_ids.device)], dim=1)


class _ResolvedOptions(NamedTuple):
    """A call's options as transformers understands them.

    Attributes:
        config, options: as given, but for what transformers cannot be given.
        prepared: for a prompt of ``width`` tokens.
    """

    config: GenerationConfig | None
    options: dict[str, Any]
    pad_token_id: Any
    prepared: Prepared
    width: int


# Of each target what calls without a look at the text came to, by their options: preparing takes transformers a
# millisecond.
_resolved: WeakKeyDictionary[Target, dict[str, _ResolvedOptions]] = WeakKeyDictionary()
_MOST_RESOLVED = 64


def _resolve_options(
    target: Target, config: GenerationConfig | None, options: dict[str, Any], input_ids: Tensor
) -> _ResolvedOptions:
    """From an earlier call with the same options, where the prompts have no part in what they mean."""
    if not isinstance(config, GenerationConfig | None):
        raise UnsupportedGeneration(f"generation_config is a {type(config).__name__}; give a GenerationConfig")
    known, key = _resolved.setdefault(target, {}), _key(target, config, options)
    if key is not None and (found := known.get(key)) is not None:
        width_of(input_ids)
        return found
    given = served.merged(target, config, options)
    served.refuse(target, given)
    if given.get("eos_token_id") == [] and given.get("pad_token_id") is None:
        options = {**options, "pad_token_id": 0}  # transformers would look for an end token to pad with
    config, options = served.with_stop_strings(target, config, options)
    width = width_of(input_ids)
    # A prompt as wide as the batch: lengths count from there, padding included, as in transformers.
    prepared = _prepare(target, [0] * width, None, config, options)
    prepared.refuse_own()
    found = _ResolvedOptions(config, options, given.get("pad_token_id"), prepared, width)
    counts_new_tokens = given.get("max_new_tokens") is not None and not given.get("min_length")
    if key is not None and counts_new_tokens and not prepared.looks_back:
        if len(known) >= _MOST_RESOLVED:
            known.clear()
        known[key] = found
    return found


def _key(target: Target, config: GenerationConfig | None, options: dict[str, Any]) -> str | None:
    """The same for calls whose options mean the same; None where options are more than plain values."""
    model = target.model
    configs = [None if one is None else served.without_none(vars(one)) for one in (model.generation_config, config)]
    try:
        # transformers refuses options that were set on the model's configuration: one more entry there.
        return json.dumps([configs, options, len(vars(model.config)), str(target.device)])
    except TypeError:
        return None


def _prepare(
    target: Target,
    ids: list[int],
    mask: list[bool] | None,
    generation_config: GenerationConfig | None,
    options: dict[str, Any],
) -> Prepared:
    """transformers' own preparation of a call, stopped before it decodes."""

    def stop_here(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **rest: Any,
    ) -> Prepared:
        return Prepared(generation_config, logits_processor, stopping_criteria)

    model, prompt = served.without_stop_strings(target.model), torch.tensor([ids], device=target.device)
    attended = torch.tensor([mask or [True] * len(ids)], device=target.device).long()
    try:
        return model.generate(
            prompt,
            attention_mask=attended,
            generation_config=generation_config,
            custom_generate=stop_here,
            **{name: value for name, value in options.items() if name not in served.NEUTRAL},
        )
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedGeneration(f"transformers refuses these options: {reason}") from error


def _others(found: Sequence[Any]) -> list[Any]:
    """Processors or criteria without those that are carried out here."""
    return [one for one in found if type(one) not in _OURS]


def _end_tokens(config: GenerationConfig) -> tuple[int, ...]:
    ends = config._eos_token_tensor
    return () if ends is None else tuple(ends.flatten().tolist())


def _for_row(options: dict[str, Any], row: int) -> dict[str, Any]:
    """Options of one prompt: each is prepared by itself, and a function of the prompt is told which it is."""
    allowed: Callable[[int, Tensor], list[int]] | None = options.get("prefix_allowed_tokens_fn")
    more: dict[str, Any] = {"max_length": None, "num_return_sequences": 1}
    return more if allowed is None else {**more, "prefix_allowed_tokens_fn": lambda _, ids: allowed(row, ids)}


def _new_tokens(target: Target, config: GenerationConfig, width: int, longest: int) -> int:
    """How many new tokens are allowed; the config's max_length counts padding too, as in transformers."""
    new = config.max_length - width
    limit = target.max_positions
    if limit is not None and longest + new - 1 > limit:  # the last one does not go through the target
        raise UnsupportedGeneration(
            f"a prompt of {longest} tokens and max_new_tokens {new} exceed the {limit} positions of target "
            f"{target.name}; shorten the prompt or lower max_new_tokens"
        )
    return new


def _integers(seed: Any) -> int | list[int]:
    """A seed, or one per prompt, as plain numbers."""

    def number(value: Any) -> Any:
        return value.tolist() if isinstance(value, Tensor | np.ndarray | np.generic) else value

    seed = number(seed)
    several = isinstance(seed, Sequence) and not isinstance(seed, str | bytes)
    numbers = [number(one) for one in seed] if several else [seed]
    for one in numbers:
        if isinstance(one, bool) or not isinstance(one, int):
            raise UnsupportedGeneration(f"seed {one!r} is not an integer; give one, or one per prompt")
    return numbers if several else numbers[0]
