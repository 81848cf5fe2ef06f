"""ShapeDecoder: ``generate`` with the meaning of ``model.generate``, several tokens per target forward."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from shape import bundled
from shape.drafters import Drafter, ShapeDrafter, TreeShape, make_drafter
from shape.errors import CheckpointError, ConfigError, TargetMismatch, UnsupportedGeneration
from shape.loop import AcceptanceRule, Row, Source, decode
from shape.predictor import ShapePredictor
from shape.stats import DecodeStats
from shape.target import Target
from shape.verification.acceptance import Accepted, match, trs_lossy
from shape.verification.forward import Support, probe
from shape.verification.sampling import Sampler, row_keys
from shape.verification.tree import TokenTree

# Options of GenerationConfig that are carried out, and the value each has in transformers when nobody sets it.
_SUPPORTED: dict[str, Any] = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_new_tokens": 0,
    "max_new_tokens": None,
    "max_length": None,
    "num_return_sequences": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Options that only say how to compute or what else to return, and change no token here.
_NEUTRAL = {
    "use_cache",
    "bos_token_id",
    "cache_implementation",
    "cache_config",
    "disable_compile",
    "compile_config",
}
_NEUTRAL |= {"return_dict_in_generate", "transformers_version", "max_matching_ngram_size", "use_mtp"}
_DEFAULT_NEW_TOKENS = 20


@dataclass
class ShapeOutput:
    """What ``generate(..., return_dict_in_generate=True)`` returns.

    Attributes:
        sequences: (B * num_return_sequences, L) int64, prompts as given, followed by the new tokens and padding.
        stats: counts and times.
        trace: per row the emitted (token id, source) pairs; source is "prefill", "draft" or "target". Only with
            ``trace=True``.
    """

    sequences: Tensor
    stats: DecodeStats
    trace: list[list[tuple[int, Source]]] | None = None


@dataclass(frozen=True)
class TrsLossy:
    """Parameters of the paper's tree rejection sampling; lossy.

    Attributes:
        k: candidates per position.
        depth: N, positions per step; k^N paths are scored.
        threshold: share of the best path's joint probability that a path needs to be kept.
    """

    k: int = 3
    depth: int = 3
    threshold: float = 0.8

    def __call__(self, tree: TokenTree, logits: Tensor, sampler: Sampler) -> Accepted:
        log_p = (logits.float() if sampler.greedy else sampler.warp(logits)).log_softmax(-1)
        rows = torch.arange(tree.tokens.shape[0], device=tree.tokens.device)[:, None]
        node_log_p = log_p[rows, tree.parent.clamp(min=0), tree.tokens]
        node_log_p = node_log_p.masked_fill(tree.parent < 0, 0.0)
        return trs_lossy(tree, node_log_p, sampler.choose(logits, tree.depth), self.threshold)


def match_rule(tree: TokenTree, logits: Tensor, sampler: Sampler) -> Accepted:
    """The lossless default: see ``acceptance.match``."""
    return match(tree, sampler.choose(logits, tree.depth))


class ShapeDecoder:
    """A target and a drafter, decoding together.

    Args:
        target: a causal LM from transformers, or a Target.
        drafter: a Drafter, the name of one that needs no training ("ngram"), or None for plain decoding in the
            same loop.
        tokenizer: the target's; only needed where text goes in or out.

    Raises:
        UnsupportedTarget: the target cannot be verified exactly (found out by a probe at this point).
        TargetMismatch: the drafter was made for another target.
    """

    def __init__(
        self,
        target: PreTrainedModel | Target,
        drafter: Drafter | str | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.target = Target.load(target, tokenizer=tokenizer)
        self.drafter = make_drafter(drafter) if isinstance(drafter, str) else drafter
        if self.drafter is not None:
            self.drafter.bind(self.target)
        if self.target.support is None:
            self.target.support = probe(self.target)
        self.support: Support = self.target.support

    @classmethod
    def from_pretrained(
        cls,
        predictor: str | Path | None,
        target: str | Path | PreTrainedModel | Target | None = None,
        tokenizer: Any = None,
        dtype: str | torch.dtype | None = None,
        device_map: Any = None,
        drafter: str | None = None,
        tree: TreeShape | None = None,
    ) -> "ShapeDecoder":
        """A decoder from an exported predictor, from a target and the name of a drafter, or both.

        Args:
            predictor: folder, hub id or bundled name of an exported predictor; None for other drafters.
            target: the target; None takes the one that the predictor was trained for.
            dtype: of the target; None keeps the checkpoint's own.
            drafter: "shape" (the default with a predictor), "ngram", or "none".
            tree: shape of the predictor's draft tree; None takes its own default.

        Raises:
            ConfigError: neither predictor nor target, or a predictor for a drafter that takes none.
            CheckpointError: no predictor can be read there.
            TargetMismatch: predictor and target do not belong together.
        """
        if predictor is None:
            if target is None:
                raise ConfigError("neither a predictor nor a target is given; give at least one of them")
            if drafter == "shape":
                raise ConfigError("drafter 'shape' needs a predictor; give the folder of an exported one")
            return cls(Target.load(target, tokenizer=tokenizer, dtype=dtype, device_map=device_map), drafter)
        network = load_predictor(predictor)
        if target is None:
            known = network.config.target_identity
            if known is None:
                raise TargetMismatch(f"predictor {predictor} does not say which target it was trained for; give it")
            target = known["name"]
        loaded = Target.load(target, tokenizer=tokenizer, dtype=dtype, device_map=device_map)
        if drafter not in (None, "shape"):
            return cls(loaded, drafter)
        return cls(loaded, ShapeDrafter(network.to(loaded.device, _draft_dtype(loaded)), tree))  # type: ignore[arg-type]

    @property
    def tokenizer(self) -> Any:
        return self.target.tokenizer

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        streamer: BaseStreamer | None = None,
        return_dict_in_generate: bool = False,
        acceptance: str | TrsLossy = "match",
        trace: bool = False,
        **options: Any,
    ) -> Tensor | ShapeOutput:
        """Continue the prompts, with the meaning of ``model.generate``.

        Greedy output equals the target's own. Sampled output has the target's distribution and, at the same
        seed, is the same for every drafter and tree, plain decoding included.

        Args:
            input_ids: (B, L) int64, padded on either side where attention_mask is 0.
            attention_mask: (B, L); None infers padding from the pad token as transformers does.
            generation_config: None takes the target's; options given by name go before it.
            seed: of the sampling noise, one number or one per prompt; None draws one from torch's global
                generator.
            streamer: gets the prompt, then new tokens as they are settled; one row only.
            acceptance: "match", or the lossy rule of the paper as "trs-lossy" or TrsLossy(k, depth, threshold).
            trace: record the source of every token.
            options: do_sample, temperature, top_k, top_p, min_new_tokens, max_new_tokens, max_length,
                eos_token_id, pad_token_id, num_return_sequences.

        Raises:
            UnsupportedGeneration: an option or a prompt that cannot be served, before anything is computed.
        """
        request = _Request.resolve(self.target, input_ids, attention_mask, generation_config, options)
        if streamer is not None and len(request.prompts) > 1:
            raise UnsupportedGeneration(
                f"a streamer follows one row, and {len(request.prompts)} were asked for; decode them one by one"
            )
        rule, drafter = self._rule(acceptance)
        lossless = rule is match_rule
        stats = DecodeStats(
            drafter="none" if drafter is None else drafter.name,
            acceptance="match" if lossless else "trs-lossy",
            lossless=lossless,
            row_emitted=[0] * len(request.prompts),
            row_forwards=[0] * len(request.prompts),
        )
        if streamer is not None:
            streamer.put(input_ids.cpu())

        def emit(row: int, tokens: list[int]) -> None:
            if streamer is not None:
                streamer.put(torch.tensor(tokens))

        rows: list[Row] = []
        keys = request.keys(seed)
        everyone = list(range(len(request.prompts)))
        # Targets that can only verify chains do so for one row at a time.
        groups = [everyone] if self.support.mode == "tree" else [[row] for row in everyone]
        for group in groups:
            rows += decode(
                self.target,
                self.support,
                drafter,
                [request.prompts[row] for row in group],
                request.sampler(group, keys),
                max_new_tokens=request.max_new_tokens,
                eos_token_ids=request.eos_token_ids,
                acceptance=rule,
                emit=emit,
                stats=stats,
                rows=group,
            )
        if streamer is not None:
            streamer.end()
        sequences = request.assemble(input_ids, [row.new for row in rows])
        if not return_dict_in_generate:
            return sequences
        record = [list(zip(row.new, row.sources, strict=True)) for row in rows] if trace else None
        return ShapeOutput(sequences, stats, record)

    def _rule(self, acceptance: str | TrsLossy) -> tuple[AcceptanceRule, Drafter | None]:
        """The rule, and the drafter with the trees that it needs."""
        if acceptance == "match":
            return match_rule, self.drafter
        if acceptance == "trs-lossy":
            acceptance = TrsLossy()
        if not isinstance(acceptance, TrsLossy):
            raise UnsupportedGeneration(
                f"acceptance rule {acceptance!r} is unknown; use 'match' (lossless) or 'trs-lossy'"
            )
        if not isinstance(self.drafter, ShapeDrafter):
            raise UnsupportedGeneration("acceptance 'trs-lossy' needs the k^N trees of a SHAPE predictor; give one")
        if self.support.mode == "chain":
            raise UnsupportedGeneration(
                f"acceptance 'trs-lossy' needs trees, and target {self.target.name} verifies chains only"
            )
        drafter = ShapeDrafter(self.drafter.predictor, TreeShape.full(acceptance.k, acceptance.depth))
        drafter.bind(self.target)
        return acceptance, drafter


def _draft_dtype(target: Target) -> torch.dtype:
    """bfloat16 where the hardware multiplies in it: a draft's rounding costs acceptance, never a token."""
    if target.dtype != torch.float32:
        return target.dtype
    fast = target.device.type == "cuda" or (
        target.device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()  # type: ignore[attr-defined]
    )
    return torch.bfloat16 if fast else target.dtype


def load_predictor(source: str | Path) -> ShapePredictor:
    """An exported predictor in eval mode.

    Raises:
        CheckpointError: nothing that can be read there.
    """
    where = bundled.resolve(str(source))
    try:
        predictor = ShapePredictor.from_pretrained(where)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"predictor {source} cannot be read; give a folder written by shape.train or a hub id ({reason})"
        ) from error
    return predictor.eval().requires_grad_(False)


@dataclass(frozen=True)
class _Request:
    """A call of ``generate`` after transformers' rules of precedence: by name, generation_config, the target's."""

    prompts: list[list[int]]
    samples: int
    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
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
    ) -> "_Request":
        values = _resolve_options(target, generation_config, options)
        eos = values["eos_token_id"]
        eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        pad = values["pad_token_id"]
        prompts = _prompts(input_ids, attention_mask, pad, eos_ids)
        longest = input_ids.shape[1]
        new = values["max_new_tokens"]
        if new is None and values["max_length"] is not None:
            new = values["max_length"] - longest
            if new < 1:
                raise UnsupportedGeneration(
                    f"max_length {values['max_length']} leaves no room behind prompts of {longest} tokens; "
                    "give max_new_tokens"
                )
        new = _DEFAULT_NEW_TOKENS if new is None else new
        if new < 1:
            raise UnsupportedGeneration(f"max_new_tokens is {new}; it must be at least 1")
        limit = target.max_positions
        needed = max(map(len, prompts)) + new
        if limit is not None and needed > limit:
            raise UnsupportedGeneration(
                f"a prompt of {needed - new} tokens and max_new_tokens {new} exceed the {limit} positions of target "
                f"{target.name}; shorten the prompt or lower max_new_tokens"
            )
        samples, temperature = values["num_return_sequences"], float(values["temperature"])
        if not values["do_sample"]:
            temperature = 0.0
            if samples > 1:
                raise UnsupportedGeneration(
                    f"num_return_sequences {samples} without do_sample would repeat one greedy answer; set do_sample"
                )
        elif not temperature > 0.0:
            raise UnsupportedGeneration(
                f"temperature {temperature} cannot be sampled at; leave do_sample off to decode greedily"
            )
        return cls(
            prompts=[prompt for prompt in prompts for _ in range(samples)],
            samples=samples,
            max_new_tokens=new,
            min_new_tokens=values["min_new_tokens"] or 0,
            temperature=temperature,
            top_k=values["top_k"] or 0,
            top_p=1.0 if values["top_p"] is None else values["top_p"],
            eos_token_ids=eos_ids,
            pad_token_id=pad if pad is not None else (eos_ids[0] if eos_ids else 0),
            device=target.device,
        )

    def keys(self, seed: int | Sequence[int] | None) -> Tensor | None:
        if self.temperature == 0.0:
            return None
        rows = len(self.prompts) // self.samples
        if seed is None:
            seed = int(torch.randint(2**62, ()))
        elif not isinstance(seed, int) and len(seed) != rows:
            raise UnsupportedGeneration(f"{len(seed)} seeds are given for {rows} prompts; give one, or one per prompt")
        return row_keys(seed, rows, self.samples, self.device)

    def sampler(self, rows: list[int], keys: Tensor | None) -> Sampler:
        return Sampler(
            prompt_lengths=torch.tensor([len(self.prompts[row]) for row in rows], device=self.device),
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_new_tokens=self.min_new_tokens,
            eos_token_ids=self.eos_token_ids,
            keys=None if keys is None else keys[rows],
        )

    def assemble(self, input_ids: Tensor, new: list[list[int]]) -> Tensor:
        """Prompts as they were given, followed by new tokens, padded on the right."""
        longest = max(map(len, new))
        padded = [tokens + [self.pad_token_id] * (longest - len(tokens)) for tokens in new]
        prompts = input_ids.repeat_interleave(self.samples, dim=0)
        return torch.cat([prompts, torch.tensor(padded, device=input_ids.device)], dim=1)


def _resolve_options(
    target: Target, generation_config: GenerationConfig | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Values of the supported options; anything else that would change the output is refused."""
    layers: list[dict[str, Any]] = [options]
    layers += [config.to_dict() for config in (generation_config, target.model.generation_config) if config]
    neutral = GenerationConfig().to_dict()
    neutral.update(_NEUTRAL_WHEN_UNSET)
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        merged.update({name: value for name, value in layer.items() if value is not None})
    for name, value in merged.items():
        if name in _SUPPORTED or name in _NEUTRAL or name.startswith("_"):
            continue
        if name not in neutral:
            raise UnsupportedGeneration(f"option {name} is not one of generate's; see ShapeDecoder.generate")
        if value not in (neutral[name], None, False) and value != _NEUTRAL_WHEN_UNSET.get(name):
            raise UnsupportedGeneration(
                f"option {name}={value!r} is not supported by speculative decoding here; set it to "
                f"{_NEUTRAL_WHEN_UNSET.get(name)!r}, or use the target's own generate"
            )
    return {name: merged.get(name, default) for name, default in _SUPPORTED.items()}


# Values with which an unsupported option changes nothing.
_NEUTRAL_WHEN_UNSET: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "typical_p": 1.0,
    "min_p": 0.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "diversity_penalty": 0.0,
    "penalty_alpha": 0.0,
    "early_stopping": False,
    "remove_invalid_values": False,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
}


def _prompts(
    input_ids: Tensor, attention_mask: Tensor | None, pad: int | None, eos: tuple[int, ...]
) -> list[list[int]]:
    """Token ids per row without padding."""
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        raise UnsupportedGeneration(
            f"input_ids has shape {tuple(input_ids.shape)} and dtype {input_ids.dtype}; give int64 ids of shape (B, L)"
        )
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
