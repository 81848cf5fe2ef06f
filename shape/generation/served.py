"""Which of ``generate``'s options are carried out, which change nothing here, and what is refused."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, SupportsFloat

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria

from shape.data.backends import in_words
from shape.errors import UnsupportedGeneration
from shape.generation.prompts import require_tokens
from shape.target.chat import thinks
from shape.target.model import Target
from shape.target.support import CACHE_NAMES

# Options that are carried out.
SERVED = {
    "do_sample", "temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens",
    "begin_suppress_tokens", "exponential_decay_length_penalty", "remove_invalid_values", "renormalize_logits",
    "min_length", "min_new_tokens", "max_length", "max_new_tokens", "max_time", "stop_strings", "eos_token_id",
    "pad_token_id", "num_return_sequences", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
    "tokenizer",
}  # fmt: skip
# Options that only say how to compute or what else to return, and change no token here.
NEUTRAL = {
    "use_cache", "bos_token_id", "cache_implementation", "cache_config", "disable_compile", "compile_config",
    "return_dict_in_generate", "transformers_version", "max_matching_ngram_size", "use_mtp", "max_cache_len",
    "prefill_chunk_size", "low_memory", "continuous_batching_config", "decoder_start_token_id", "logits_to_keep",
    # How an assistant drafts; the assistant itself is refused.
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind",
    "target_lookbehind",
}  # fmt: skip
# Values with which an option that is not carried out changes nothing.
NEUTRAL_VALUES: dict[str, Any] = {
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
    **dict.fromkeys(CACHE_NAMES),
    "negative_prompt_ids": None,
    "negative_prompt_attention_mask": None,
    "synced_gpus": False,
}


# Options whose processors take the slow way, as they look at the text before a token or ask the host for every token,
# and with what they do nothing.
_SLOW: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "remove_invalid_values": False,
    **dict.fromkeys(
        ("bad_words_ids", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens",
         "begin_suppress_tokens", "exponential_decay_length_penalty")
    ),
}  # fmt: skip
_SLOW_IN_SAMPLING: dict[str, Any] = {"eta_cutoff": 0.0, "top_h": None}

_COLDEST = 1e-30  # of temperatures: below, float32 scores over it overflow, and which is largest is lost
_ANSWER = {False: 512, True: 4096}  # tokens at most, where nobody says how many; True: of targets that reason first

# Every option of transformers' generate, and what it is where nobody says.
_KNOWN = GenerationConfig().to_dict() | NEUTRAL_VALUES


def without_none(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def merged(target: Target, generation_config: GenerationConfig | None, options: dict[str, Any]) -> dict[str, Any]:
    """The options that are given by name, as None too, or else by configurations, in which transformers ignores what it
    does not know, as some targets' have it.
    """
    given: dict[str, Any] = {}
    for config in (target.model.generation_config, generation_config):
        if config is not None:
            given |= {name: value for name, value in without_none(config.to_dict()).items() if name in _KNOWN}
    return without_none(given | options)


def slow_by_itself(target: Target, config: GenerationConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """What takes the slow way in a call because the target's generation config says so: options with their values.

    Args:
        config: what transformers makes of the whole call.
        given: options that the caller gave by name; none where transformers has prepared the call, of which an equal
            value counts as the target's.
    """
    own, slow = target.model.generation_config, _SLOW | (_SLOW_IN_SAMPLING if config.do_sample else {})
    found = {name: getattr(config, name, None) for name in slow if name not in given}
    return {
        name: value
        for name, value in found.items()
        if value is not None and value != slow[name] and value == getattr(own, name, None)
    }


def warn_of_slow(target: Target, own: Mapping[str, Any]) -> None:
    """Says what `slow_by_itself` found: nobody asked for it by name. Measurements are without penalties alone
    (`shape.data.backends.sampling`).
    """
    off = ", ".join(f"{name}={(_SLOW | _SLOW_IN_SAMPLING)[name]!r}" for name in own)
    warnings.warn(
        f"the generation_config of target {target.name} has {in_words(own)}, as in its own generate: tokens are chosen "
        "by transformers' processors, without compiled loops or CUDA graphs, so every step takes longer; "
        f"{off} switches that off, and answers then differ",
        stacklevel=5,  # the caller of `generate`; of `chat` it is that itself
    )


def refuse(target: Target, given: dict[str, Any]) -> None:
    """Raises for options that do not exist, and for those and the model's inputs that would be ignored here."""
    for name, value in given.items():
        if (name, value) == ("cache_implementation", "quantized"):
            raise UnsupportedGeneration(
                "cache_implementation='quantized' rounds keys and values, which is not done here; leave it out, or use "
                "the target's own generate"
            )
        if name in SERVED or name in NEUTRAL or name.startswith("_"):
            continue
        if name not in _KNOWN:
            takers = target.model.forward, target.model.prepare_inputs_for_generation
            if any(name in inspect.signature(taker).parameters for taker in takers):
                raise UnsupportedGeneration(
                    f"input {name} of the model is not supported by speculative decoding here; leave it out, or use "
                    "the target's own generate"
                )
            raise UnsupportedGeneration(f"option {name} is not one of generate's; see ShapeDecoder.generate")
        simple = isinstance(value, bool | int | float | str)
        if value is not False and not (simple and value in (_KNOWN[name], NEUTRAL_VALUES.get(name))):
            shown = f"{name}={value!r}" if simple else name
            raise UnsupportedGeneration(
                f"option {shown} is not supported by speculative decoding here; set it to "
                f"{NEUTRAL_VALUES.get(name)!r}, or use the target's own generate"
            )
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        if (forced := given.get(name)) is not None:
            require_tokens(target, forced if isinstance(forced, list) else [forced], f"{name} is")
    for banned in given.get("bad_words_ids") or ():
        require_tokens(target, banned, "bad_words_ids holds")
    if not isinstance(longest := given.get("max_time", 0.0), SupportsFloat):
        raise UnsupportedGeneration(f"max_time is {longest!r}; give seconds")
    for name in ("logits_processor", "stopping_criteria"):
        if strange := [one for one in given.get(name) or () if not callable(one)]:
            raise UnsupportedGeneration(f"{name} holds {strange[0]!r}; give functions, or objects that can be called")
    heat = given.get("temperature", 1.0)
    if given.get("do_sample") and not (isinstance(heat, SupportsFloat) and float(heat) >= _COLDEST):
        raise UnsupportedGeneration(
            f"temperature {heat} cannot be sampled at; give a number of at least {_COLDEST}, or leave do_sample off to "
            "decode greedily"
        )
    for name in ("max_new_tokens", "num_return_sequences"):
        count = given.get(name, 1)
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
            raise UnsupportedGeneration(f"{name} is {count!r}; it must be at least 1 and an integer")


def as_long_as_answers(target: Target, ids: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """Options for text behind ids (1, L), of which transformers' default length is no answer's.

    Raises:
        UnsupportedGeneration: what goes with token ids, or with several answers.
    """
    lengths, given = ("max_new_tokens", "max_length"), options.get("generation_config")
    own, count = target.model.generation_config, "num_return_sequences"
    if options.pop("attention_mask", None) is not None:
        raise UnsupportedGeneration("attention_mask goes with token ids; leave it out beside text and messages")
    if merged(target, given, {count: options[count]} if count in options else {}).get(count, 1) != 1:
        raise UnsupportedGeneration(f"text is of one answer; leave {count} out, or use generate")
    # None is as if not said: given to transformers, it would hide the configurations' lengths.
    options = {name: value for name, value in options.items() if value is not None or name not in lengths}
    if any(name in options or getattr(given, name, None) for name in lengths):
        return options
    # The target's own max_length is no answer's: old files have 20 there.
    longest = getattr(own, "max_new_tokens", None) or _ANSWER[thinks(ids[0].tolist(), target.tokenizer)]
    if target.max_positions is not None:
        longest = max(1, min(longest, target.max_positions - ids.shape[1]))
    return {**options, "max_new_tokens": longest}


def ends_of(target: Target, options: Mapping[str, Any]) -> list[int]:
    """The end tokens of a call with these options."""
    given = getattr(options.get("generation_config"), "eos_token_id", None)
    ends = options.get("eos_token_id", target.eos_token_ids if given is None else given)
    return [] if ends is None else torch.as_tensor(ends).flatten().tolist()


def with_stop_strings(
    target: Target, generation_config: GenerationConfig | None, options: dict[str, Any]
) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """Stop strings as the criterion that they become: the tokenizer that they need does not reach ``_prepare``."""
    options, by_name = dict(options), "stop_strings" in options
    tokenizer = options.pop("tokenizer", None) or target.tokenizer
    strings = options.pop("stop_strings", None)
    for config in () if by_name else (generation_config, target.model.generation_config):
        if strings is None and config is not None:
            strings = config.stop_strings
    if generation_config is not None:
        generation_config = copy(generation_config)
        generation_config.stop_strings = None
    if strings is None:
        return generation_config, options
    named = [strings] if isinstance(strings, str) else strings
    if not isinstance(named, Sequence) or not all(isinstance(one, str) and one for one in named):
        raise UnsupportedGeneration(f"stop_strings is {strings!r}; give a string that is not empty, or several")
    if named and tokenizer is None:
        raise UnsupportedGeneration("stop_strings need a tokenizer, and the target has none; give one with tokenizer")
    criteria = [StopStringCriteria(tokenizer, list(named))] if named else []
    given = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), *criteria])
    return generation_config, {**options, "stopping_criteria": given}


def without_stop_strings(model: Any) -> Any:
    """The model, with its parts, whose own configuration asks for no stop strings: see ``with_stop_strings``."""
    if model.generation_config is None or model.generation_config.stop_strings is None:
        return model
    other = copy(model)
    other.generation_config = copy(model.generation_config)
    other.generation_config.stop_strings = None
    return other
