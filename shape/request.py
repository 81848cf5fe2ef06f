"""What a call of ``generate`` asks for, as transformers itself understands it.

transformers prepares each call: precedence of options, logits processors, stopping criteria. ``custom_generate`` lets
us stop behind that preparation and take what it made, so that options mean here what they mean there.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    StopStringCriteria,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from shape.errors import UnsupportedGeneration
from shape.target import Target
from shape.verification.noise import row_keys
from shape.verification.sampling import Sampler

# Options that are carried out.
_SERVED = {
    "do_sample", "temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens",
    "begin_suppress_tokens", "exponential_decay_length_penalty", "remove_invalid_values", "renormalize_logits",
    "min_length", "min_new_tokens", "max_length", "max_new_tokens", "max_time", "stop_strings", "eos_token_id",
    "pad_token_id", "num_return_sequences", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
    "tokenizer",
}  # fmt: skip
# Options that only say how to compute or what else to return, and change no token here.
_NEUTRAL = {
    "use_cache", "bos_token_id", "cache_implementation", "cache_config", "disable_compile", "compile_config",
    "return_dict_in_generate", "transformers_version", "max_matching_ngram_size", "use_mtp",
    # How an assistant drafts; the assistant itself is refused.
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind",
    "target_lookbehind",
}  # fmt: skip
# Values with which an option that is not carried out changes nothing.
_NEUTRAL_VALUES: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "length_penalty": 1.0,
    "diversity_penalty": 0.0,
    "penalty_alpha": 0.0,
    "guidance_scale": 1.0,
    "early_stopping": False,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "assistant_model": None,
    "assistant_tokenizer": None,
    "inputs_embeds": None,
    "past_key_values": None,
    "negative_prompt_ids": None,
    "negative_prompt_attention_mask": None,
}
# These look at the scores of a token alone; all others may look at the text before it.
_SCORES_ALONE = (
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    SuppressTokensLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
)
# Carried out here, for rows of unequal length.
_OURS = (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor, MaxLengthCriteria, EosTokenCriteria)


class Prepared(NamedTuple):
    """What transformers makes of the options for one prompt."""

    config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList

    @property
    def processors_look_back(self) -> bool:
        """Whether any processor depends on the text before a token."""
        return any(not isinstance(one, _SCORES_ALONE) for one in _others(self.processors))

    @property
    def looks_back(self) -> bool:
        """Whether anything here depends on the text before a token, and so on the row."""
        return self.processors_look_back or bool(_others(self.criteria))


@dataclass(frozen=True)
class Request:
    """One call, with an entry per row where rows differ. A prompt's samples are adjacent rows.

    Attributes:
        prompts: token ids of every row, without padding.
        samples: rows per prompt.
        warpers, processors: see ``Sampler``.
        criteria: per row, reasons to stop beside length and end tokens; None where there are none.
    """

    prompts: list[list[int]]
    samples: int
    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    warpers: tuple[LogitsProcessor, ...]
    processors: list[LogitsProcessorList] | None
    criteria: list[StoppingCriteriaList] | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    device: torch.device

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
        given = _merged(target, generation_config, options)
        _refuse(given)
        if given.get("eos_token_id") == [] and given.get("pad_token_id") is None:
            options = {**options, "pad_token_id": 0}  # transformers would look for an end token to pad with
        generation_config, options = _with_stop_strings(target, generation_config, options)
        width = _width(input_ids)

        def prepare(ids: list[int], **more: Any) -> Prepared:
            return _prepare(target, ids, generation_config, {**options, **more})

        # A row as wide as the batch: lengths count from there, padding included, as in transformers.
        first = prepare([0] * width)
        prompts = _prompts(input_ids, attention_mask, given.get("pad_token_id"), _end_tokens(first.config))
        new = _new_tokens(target, first.config, width, max(map(len, prompts)))
        samples = first.config.num_return_sequences or 1
        each = [first]
        if first.looks_back:
            each = [prepare(prompt, max_new_tokens=new, **_for_row(options, row)) for row, prompt in enumerate(prompts)]
        return cls._of(target, prompts, samples, width, new, first, each)

    @classmethod
    def of_prepared(
        cls, target: Target, input_ids: Tensor, attention_mask: Tensor | None, prepared: Prepared
    ) -> "Request":
        """The call that transformers has prepared itself, for `generate(custom_generate=...)`."""
        width = _width(input_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        prompts = _prompts(input_ids, mask, None, ())
        if len(prompts) > 1 and prepared.looks_back:
            raise UnsupportedGeneration(
                "options that look at the text so far were prepared for the batch with its padding; give one prompt at "
                "a time, or call ShapeDecoder.generate"
            )
        new = _new_tokens(target, prepared.config, width, max(map(len, prompts)))
        return cls._of(target, prompts, 1, width, new, prepared, [prepared])

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
    ) -> "Request":
        config, eos = shared.config, _end_tokens(shared.config)
        pad = config._pad_token_tensor
        processors = criteria = None
        if shared.processors_look_back:
            processors = [LogitsProcessorList(_others(own.processors)) for own in each for _ in range(samples)]
        if _others(shared.criteria):
            criteria = [StoppingCriteriaList(_others(own.criteria)) for own in each for _ in range(samples)]
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
            device=target.device,
        )

    def keys(self, seed: int | Sequence[int] | None) -> Tensor | None:
        """Keys of the rows' noise; None when greedy."""
        if self.temperature == 0.0:
            return None
        rows = len(self.prompts) // self.samples
        if seed is None:
            seed = int(torch.randint(2**62, ()))
        elif not isinstance(seed, int) and len(seed) != rows:
            raise UnsupportedGeneration(f"{len(seed)} seeds are given for {rows} prompts; give one, or one per prompt")
        return row_keys(seed, rows, self.samples, self.device)

    def sampler(self, rows: list[int], keys: Tensor | None, coupled: bool = True) -> Sampler:
        """The sampler of some rows."""
        return Sampler(
            prompt_lengths=torch.tensor([len(self.prompts[row]) for row in rows], device=self.device),
            temperature=self.temperature,
            keys=None if keys is None else keys[rows],
            warpers=self.warpers,
            processors=None if self.processors is None else tuple(self.processors[row] for row in rows),
            min_new_tokens=self.min_new_tokens,
            eos_token_ids=self.eos_token_ids,
            coupled=coupled,
        )

    def assemble(self, input_ids: Tensor, new: list[list[int]]) -> Tensor:
        """Prompts as they were given, followed by new tokens, padded on the right."""
        longest = max(map(len, new))
        padded = [tokens + [self.pad_token_id] * (longest - len(tokens)) for tokens in new]
        prompts = input_ids.repeat_interleave(self.samples, dim=0)
        return torch.cat([prompts, torch.tensor(padded, device=input_ids.device)], dim=1)


def _merged(target: Target, generation_config: GenerationConfig | None, options: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for config in (target.model.generation_config, generation_config):
        if config is not None:
            merged.update({name: value for name, value in config.to_dict().items() if value is not None})
    return merged | {name: value for name, value in options.items() if value is not None}


def _refuse(given: dict[str, Any]) -> None:
    """Raises for options that do not exist, and for those that exist and would be ignored here."""
    known = GenerationConfig().to_dict() | _NEUTRAL_VALUES
    for name, value in given.items():
        if name in _SERVED or name in _NEUTRAL or name.startswith("_"):
            continue
        if name not in known:
            raise UnsupportedGeneration(f"option {name} is not one of generate's; see ShapeDecoder.generate")
        simple = isinstance(value, bool | int | float | str)
        if value is not False and not (simple and value in (known[name], _NEUTRAL_VALUES.get(name))):
            shown = f"{name}={value!r}" if simple else name
            raise UnsupportedGeneration(
                f"option {shown} is not supported by speculative decoding here; set it to "
                f"{_NEUTRAL_VALUES.get(name)!r}, or use the target's own generate"
            )
    if given.get("do_sample") and not float(given.get("temperature", 1.0)) > 0.0:
        raise UnsupportedGeneration(
            f"temperature {given['temperature']} cannot be sampled at; leave do_sample off to decode greedily"
        )
    if (new := given.get("max_new_tokens")) is not None and new < 1:
        raise UnsupportedGeneration(f"max_new_tokens is {new}; it must be at least 1")


def _with_stop_strings(
    target: Target, generation_config: GenerationConfig | None, options: dict[str, Any]
) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """Stop strings as the criterion that they become: the tokenizer that they need does not reach ``_prepare``."""
    options = dict(options)
    tokenizer = options.pop("tokenizer", None) or target.tokenizer
    strings = options.pop("stop_strings", None)
    if strings is None and generation_config is not None:
        strings = generation_config.stop_strings
    if strings is None:
        return generation_config, options
    if tokenizer is None:
        raise UnsupportedGeneration("stop_strings need a tokenizer, and the target has none; give one with tokenizer")
    if generation_config is not None:
        generation_config = copy(generation_config)
        generation_config.stop_strings = None
    criteria = StoppingCriteriaList([*options.get("stopping_criteria", ()), StopStringCriteria(tokenizer, strings)])
    return generation_config, {**options, "stopping_criteria": criteria}


def _prepare(
    target: Target, ids: list[int], generation_config: GenerationConfig | None, options: dict[str, Any]
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

    prompt = torch.tensor([ids], device=target.device)
    try:
        return target.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=generation_config,
            custom_generate=stop_here,
            **{name: value for name, value in options.items() if name not in _NEUTRAL},
        )
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedGeneration(f"transformers refuses these options: {reason}") from error


def _others(found: Sequence[Any]) -> list[Any]:
    """Processors or criteria without those that are carried out here."""
    return [one for one in found if not isinstance(one, _OURS)]


def _end_tokens(config: GenerationConfig) -> tuple[int, ...]:
    ends = config._eos_token_tensor
    return () if ends is None else tuple(ends.flatten().tolist())


def _for_row(options: dict[str, Any], row: int) -> dict[str, Any]:
    """Options that change with the row: rows are prepared one by one, and a function of the row must hear which."""
    allowed: Callable[[int, Tensor], list[int]] | None = options.get("prefix_allowed_tokens_fn")
    more: dict[str, Any] = {"max_length": None, "num_return_sequences": 1}
    return more if allowed is None else {**more, "prefix_allowed_tokens_fn": lambda _, ids: allowed(row, ids)}


def _new_tokens(target: Target, config: GenerationConfig, width: int, longest: int) -> int:
    """How many new tokens are allowed; the config's max_length counts padding too, as in transformers."""
    new = config.max_length - width
    limit = target.max_positions
    if limit is not None and longest + new > limit:
        raise UnsupportedGeneration(
            f"a prompt of {longest} tokens and max_new_tokens {new} exceed the {limit} positions of target "
            f"{target.name}; shorten the prompt or lower max_new_tokens"
        )
    return new


def _width(input_ids: Tensor | None) -> int:
    if input_ids is None:
        raise UnsupportedGeneration("no prompt is given; give input_ids of at least one token")
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        raise UnsupportedGeneration(
            f"input_ids has shape {tuple(input_ids.shape)} and dtype {input_ids.dtype}; give int64 ids of shape (B, L)"
        )
    return input_ids.shape[1]


def _prompts(
    input_ids: Tensor, attention_mask: Tensor | None, pad: int | None, eos: tuple[int, ...]
) -> list[list[int]]:
    """Token ids per row without padding."""
    if attention_mask is None:
        # As transformers: padding is inferred only where the pad token cannot also be an end token.
        inferable = pad is not None and pad not in eos
        attention_mask = input_ids.ne(pad) if inferable and pad is not None else torch.ones_like(input_ids)
    elif attention_mask.shape != input_ids.shape:
        raise UnsupportedGeneration(
            f"attention_mask has shape {tuple(attention_mask.shape)}, and input_ids {tuple(input_ids.shape)}; "
            "give one of equal shape"
        )
    prompts = []
    for row, (ids, mask) in enumerate(zip(input_ids.tolist(), attention_mask.bool().tolist(), strict=True)):
        kept = [i for i, here in enumerate(mask) if here]
        if not kept:
            raise UnsupportedGeneration(f"prompt {row} is empty; give at least one token per row")
        if kept[-1] - kept[0] + 1 != len(kept):
            raise UnsupportedGeneration(
                f"attention_mask of row {row} hides tokens in the middle of the prompt; only padding on either side "
                "can be masked"
            )
        prompts.append([ids[i] for i in kept])
    return prompts
