"""ShapeDecoder: ``generate`` with the meaning of ``model.generate``, several tokens per target forward."""

import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from shape import bundled, streams
from shape.config import ShapeConfig
from shape.drafters import PREDICTORS, Drafter, ModelDrafter, TrainedDrafter, TreeShape, make_drafter
from shape.drafters.model import Lookahead, make_lookahead
from shape.drafters.recipes import Pack, RecipeDrafter
from shape.errors import CheckpointError, ConfigError, TargetMismatch, UnsupportedGeneration
from shape.fixed import FixedSteps, why_not
from shape.fixed import decode as decode_fixed
from shape.inference import gradientless
from shape.loop import Memory, Row, decode
from shape.network import Predictor
from shape.pace import Experience, Pace
from shape.pipeline import DraftingPipeline
from shape.prepack import prepack
from shape.request import Prepared, Request
from shape.rules import Rule, make_rule
from shape.stats import DecodeStats
from shape.target import Target, resolve_device
from shape.trace import Trace
from shape.verification.forward import Support, probe

_EOS_AWARE_TOKENS = 4
_WARMING = 16  # tokens, enough for a few steps
# Where a hub repository is read from, in transformers' words.
HUB_OPTIONS = frozenset({"revision", "token", "cache_dir", "local_files_only", "force_download", "proxies"})


@dataclass
class ShapeOutput:
    """What ``generate(..., return_dict_in_generate=True)`` returns.

    Attributes:
        sequences: (B * num_return_sequences, L) int64, prompts as given, followed by the new tokens and padding.
        stats: counts and times.
        trace: what became of every drafted and emitted token; only with ``trace=True``.
    """

    sequences: Tensor
    stats: DecodeStats
    trace: Trace | None = None


# The tokens that each row gets, as they are settled; then the whole.
Steps = Generator[tuple[int, list[int]], None, ShapeOutput]


class ShapeDecoder:
    """A target and a drafter, decoding together.

    Args:
        target: a causal LM from transformers, or a Target.
        drafter: a Drafter, the name of one that needs no training ("ngram"), or None for plain decoding in the
            same loop.
        tokenizer: the target's; only needed where text goes in or out.
        fall_back: decode plainly for a while where drafting does not pay (see ``pace.Pace``): by the times measured
            on the way, or where the acceptance length is below a given number. False always drafts. Rules whose samples
            depend on the drafts fall back by a given number only, so that they do not depend on the machine's times.
        graphs: decode in steps of fixed shapes, captured as CUDA graphs on a GPU, wherever a call allows it (see
            ``shape.fixed``); a FixedSteps says how. Off by default: it has not been run on a GPU yet.

    Raises:
        UnsupportedTarget: the target cannot be verified exactly (found out by a probe at this point).
        TargetMismatch: the drafter was made for another target.
    """

    def __init__(
        self,
        target: PreTrainedModel | Target,
        drafter: Drafter | str | None = None,
        tokenizer: Any = None,
        fall_back: bool | float = True,
        graphs: bool | FixedSteps = False,
    ) -> None:
        self.target = Target.load(target, tokenizer=tokenizer)
        self.drafter = make_drafter(drafter) if isinstance(drafter, str) else drafter
        if self.drafter is not None:
            self.drafter.bind(self.target)
        if self.target.support is None:
            self.target.support = probe(self.target)
        self.support: Support = self.target.support
        # What these compute in while they decode.
        self.gradientless = gradientless([self.target.model, *(() if self.drafter is None else self.drafter.networks)])
        self.fall_back = fall_back
        self.graphs = (FixedSteps() if graphs else None) if isinstance(graphs, bool) else graphs
        self._experience: dict[tuple[int, bool], Experience] = {}  # by number of rows, and whether by fixed steps

    @classmethod
    def from_pretrained(
        cls,
        predictor: str | Path | None,
        target: str | Path | PreTrainedModel | Target | None = None,
        tokenizer: Any = None,
        dtype: str | torch.dtype | None = None,
        device_map: Any = None,
        drafter: str | Sequence[str] | None = None,
        tree: TreeShape | None = None,
        fall_back: bool | float = True,
        draft_device: str | torch.device | None = None,
        graphs: bool | FixedSteps = False,
        lookahead: str | int | Lookahead = "adaptive",
        pack: str | Path | None = None,
        prepacked: bool | None = None,
        **hub: Any,
    ) -> "ShapeDecoder":
        """A decoder from an exported predictor, from a target and the name of a drafter, or both.

        Args:
            predictor: folder, hub id or bundled name of an exported predictor, or of a smaller causal LM with the
                target's tokens, which then drafts; None for other drafters.
            target: the target; None takes the one that the predictor was trained for.
            dtype: of the target; None keeps the checkpoint's own.
            device_map: see ``Target.load``.
            drafter: "shape" (the default with a predictor), "model" (with a smaller LM), a name among
                ``shape.drafters.DRAFTERS``, "none", or several, as a list or joined by "+", whose drafts are merged
                ("suffix+shape").
            tree: shape of the predictor's draft tree; None takes its own default.
            fall_back: see the class.
            graphs: see the class.
            draft_device: where the predictor drafts; None is beside the target.
            pack: file of recipes (see ``shape.drafters.recipes``), which by themselves are the drafter "recipes", and
                beside a predictor come before it.
            lookahead: of a smaller LM: "adaptive", "cost", a number of tokens, or one's own (see
                ``shape.drafters.model``).
            prepacked: see ``Target.load``; for the predictor too.
            hub: revision, token, cache_dir and the like, for a predictor from the hub.

        Raises:
            ConfigError: neither predictor nor target, a predictor for a drafter that takes none, a device that is not
                there, or an unknown option.
            CheckpointError: no predictor can be read there.
            TargetMismatch: predictor and target do not belong together.
        """
        if unknown := sorted(hub.keys() - HUB_OPTIONS):
            raise ConfigError(f"option {unknown[0]} is not one of from_pretrained's; see ShapeDecoder.from_pretrained")
        device = None if draft_device is None else resolve_device(draft_device)
        name = drafter if drafter is None or isinstance(drafter, str) else "+".join(drafter)
        parts = [] if name is None else name.split("+")
        trained = name is None or not {"shape", "model"}.isdisjoint(parts)
        if predictor is None and target is None:
            raise ConfigError("neither a predictor nor a target is given; give at least one of them")
        if predictor is None and name is not None and trained:
            raise ConfigError(f"drafter {name!r} needs a predictor; give the folder of an exported one")
        if pack is None and "recipes" in parts:
            raise ConfigError(
                f"drafter {name!r} needs a pack; give a file of `python -m shape.drafters.recipes compile`"
            )
        given: dict[str, Drafter] = {}
        if pack is not None:
            given["recipes"] = RecipeDrafter(Pack.load(pack))
        network, model = None, predictor is not None and is_language_model(predictor, **hub)
        if predictor is not None and not model:
            network = load_predictor(predictor, **hub)
            target = target or _target_of(network, predictor)
        if target is None:
            raise ConfigError(f"{predictor} is a language model, which drafts for any with its tokens: give a target")
        loaded = Target.load(target, tokenizer=tokenizer, dtype=dtype, device_map=device_map, prepacked=prepacked)
        where = device or loaded.device
        if network is not None and trained:
            network = network.to(where, _draft_dtype(loaded, where))  # type: ignore[arg-type]
            prepack(network, prepacked)
            given["shape"] = TrainedDrafter(network, tree)
        elif predictor is not None and trained:
            small = Target.load(predictor, dtype=_draft_dtype(loaded, where), device_map=where, prepacked=prepacked)
            given["model"] = ModelDrafter(small, make_lookahead(lookahead))
        chosen = make_drafter(name or "+".join(given) or "none", given)
        return cls(loaded, chosen, fall_back=fall_back, graphs=graphs)

    @property
    def tokenizer(self) -> Any:
        return self.target.tokenizer

    def warm_up(self, **options: Any) -> None:
        """Write a few tokens that nobody reads, so that no answer's time contains what is paid once: on a machine the
        compilation of the host's loops (some seconds), in a process that of steps of fixed shapes, and first touches
        of memory.

        Args:
            options: as answers will have them: those of ``generate``.
        """
        given = torch.zeros(1, 1, dtype=torch.int64, device=self.target.device)
        options |= {"max_new_tokens": _WARMING, "eos_token_id": [], "seed": 0}
        self.generate(given, torch.ones_like(given), **options)
        self._experience.clear()  # such steps say nothing about the cost of later ones

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        streamer: BaseStreamer | None = None,
        return_dict_in_generate: bool = False,
        acceptance: str | Rule = "match",
        eos_aware: bool = False,
        memory: Memory | None = None,
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
            acceptance: a rule, or its name among ``shape.rules.RULES``: "match"; "rejection" and "traversal", lossless
                too, whose samples depend on the drafter as well as on the seed; the lossy "typical-lossy" (Medusa's)
                and "trs-lossy" (the paper's), whose parameters TypicalLossy(...) and TrsLossy(...) take.
            eos_aware: no end token among the first four: for targets that end an answer at once after an empty turn.
                The same as min_new_tokens=4.
            memory: see ``session``.
            trace: record what became of every token (see ``shape.trace``).
            options: those of ``model.generate`` that greedy search and sampling have (see ``shape.request``),
                prepared by transformers itself; also logits_processor, stopping_criteria and
                prefix_allowed_tokens_fn, which see each row without padding.

        Raises:
            UnsupportedGeneration: an option or a prompt that cannot be served, before anything is computed.
        """
        steps = self._start(
            input_ids,
            attention_mask,
            generation_config,
            seed=seed,
            streaming=streamer is not None,
            acceptance=acceptance,
            eos_aware=eos_aware,
            memory=memory,
            trace=trace,
            **options,
        )
        if streamer is not None:
            streamer.put(input_ids.cpu())
        out = _finish(steps, streamer)
        return out if return_dict_in_generate else out.sequences

    @overload
    def stream(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> Iterator[list[int]]: ...

    @overload
    def stream(self, input_ids: str | Sequence[dict[str, str]], **options: Any) -> Iterator[str]: ...

    def stream(
        self, input_ids: Any, attention_mask: Tensor | None = None, **options: Any
    ) -> Iterator[list[int]] | Iterator[str]:
        """Continue one prompt, giving new tokens as they are settled: ids for ids, text for text.

        Decoding takes place in the loop that asks for more: whoever leaves it ends the decoding, and errors appear
        there. Several streams of one decoder may be open at a time.

        Args:
            input_ids: (1, L) int64, which yields lists of token ids, an end token included; or a text or the messages
                of a chat, which yields text in whole words, without special tokens.
            attention_mask: (1, L), with ids only.
            options: those of ``generate`` but for streamer and those that say what to return.

        Raises:
            UnsupportedGeneration: as in ``generate``, before anything is computed.
            DataError: text for a target that has no tokenizer.
        """
        if isinstance(input_ids, Tensor):
            return streams.ids(self._start(input_ids, attention_mask, streaming=True, **options))
        ids = self.target.encode(input_ids)
        tokens = streams.ids(self._start(ids, torch.ones_like(ids), streaming=True, **options))
        return streams.text(tokens, self.tokenizer)

    @overload
    def astream(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> AsyncIterator[list[int]]: ...

    @overload
    def astream(self, input_ids: str | Sequence[dict[str, str]], **options: Any) -> AsyncIterator[str]: ...

    def astream(self, input_ids: Any, attention_mask: Tensor | None = None, **options: Any) -> AsyncIterator[Any]:
        """``stream`` for ``async for``: each step is computed in a worker thread, and the event loop stays free."""
        return streams.in_threads(self.stream(input_ids, attention_mask=attention_mask, **options))

    def pipeline(self, **options: Any) -> DraftingPipeline:
        """``transformers.pipeline("text-generation")`` of the target, decoding with drafts.

        Calls mean what they mean to transformers; they take all options of ``generate``, a streamer and the seed too.

        Args:
            options: those of ``TextGenerationPipeline``, for instance batch_size, or options for every call.

        Raises:
            ConfigError: the target has no tokenizer.
        """
        return DraftingPipeline(self, **options)

    def session(self) -> Callable[..., Tensor | ShapeOutput]:
        """``generate`` for one conversation, turn after turn: what a prompt shares with the text before is not computed
        again.

            say = decoder.session()
            first = say(ids, max_new_tokens=64)
            second = say(torch.cat([first, more], dim=1), max_new_tokens=64)  # only `more` goes through the target

        Tokens are those of ``generate`` without a session. The cache lives as long as the session.
        """
        return partial(self.generate, memory=Memory())

    def as_custom_generate(self) -> Callable[..., Tensor | ShapeOutput]:
        """For those who call the target: ``model.generate(**inputs, custom_generate=decoder.as_custom_generate())``.

        It takes ``seed`` beside transformers' own options. transformers keeps the tokenizer to itself, so that stop
        strings need ``ShapeDecoder.generate``.
        """

        def decode_with_drafts(
            model: PreTrainedModel,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            seed: int | None = None,
            **inputs: Any,
        ) -> Tensor | ShapeOutput:
            if model is not self.target.model:
                raise UnsupportedGeneration("this decoder belongs to another model; call generate of its own target")
            prepared = Prepared(generation_config, logits_processor, stopping_criteria)
            request = Request.of_prepared(self.target, input_ids, inputs.get("attention_mask"), prepared)
            # transformers puts the prompt into a streamer, and hands the streamer to its own decoding methods only.
            caller = sys._getframe(1).f_locals
            streamer = caller.get("streamer") if caller.get("custom_generate") is decode_with_drafts else None
            out = _finish(self._carry_out(request, input_ids, seed, streaming=streamer is not None), streamer)
            return out if generation_config.return_dict_in_generate else out.sequences

        return decode_with_drafts

    def _start(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        streaming: bool = False,
        acceptance: str | Rule = "match",
        eos_aware: bool = False,
        memory: Memory | None = None,
        trace: bool = False,
        **options: Any,
    ) -> Steps:
        """The steps of a call of ``generate``; whatever is wrong with it is raised here."""
        if eos_aware:
            options["min_new_tokens"] = max(_EOS_AWARE_TOKENS, options.get("min_new_tokens") or 0)
        request = Request.resolve(self.target, input_ids, attention_mask, generation_config, options)
        if memory is not None and len(request.prompts) > 1:
            raise UnsupportedGeneration(
                f"a session continues one text, and {len(request.prompts)} rows were asked for; give each its own"
            )
        return self._carry_out(request, input_ids, seed, streaming, acceptance, memory, trace)

    def _carry_out(
        self,
        request: Request,
        input_ids: Tensor,
        seed: int | Sequence[int] | None,
        streaming: bool = False,
        acceptance: str | Rule = "match",
        memory: Memory | None = None,
        trace: bool = False,
    ) -> Steps:
        if streaming and len(request.prompts) > 1:
            raise UnsupportedGeneration(
                f"streaming follows one row, and {len(request.prompts)} were asked for; decode them one by one"
            )
        rule = make_rule(acceptance)
        drafter = rule.fit(self.drafter, self.target)
        stats = DecodeStats(
            drafter="none" if drafter is None else drafter.name,
            acceptance=rule.name,
            lossless=rule.lossless,
            row_emitted=[0] * len(request.prompts),
            row_forwards=[0] * len(request.prompts),
        )
        # Each call has its own: a stream may stay open while others decode.
        drafter, keys = copy(drafter), request.keys(seed)
        record = Trace() if trace else None
        groups = self._groups(request)

        def steps() -> Steps:
            rows: list[Row] = []
            for group in groups:
                sampler = request.sampler(group, keys, rule.coupled)
                prompts = [request.prompts[row] for row in group]
                inputs = (self.target, self.support, drafter, prompts, sampler)
                fixed = self.graphs if memory is None and record is None else None
                longest = max(map(len, prompts))
                asked = self.target, self.support, drafter, sampler, rule, longest, request.max_new_tokens
                if fixed is not None and why_not(*asked) is not None:
                    fixed = None
                options: dict[str, Any] = {
                    "max_new_tokens": request.max_new_tokens,
                    "eos_token_ids": request.eos_token_ids,
                    "criteria": request.criteria and [request.criteria[row] for row in group],
                    "stats": stats,
                    "rows": group,
                    "pace": self._pace(drafter, (len(group), fixed is not None), by_times=rule.same_for_every_draft),
                }
                stats.graphs = fixed is not None
                if fixed is not None:
                    rows += yield from decode_fixed(fixed, *inputs, **options)
                else:
                    options |= {"acceptance": rule, "memory": memory, "trace": record}
                    rows += yield from self.gradientless()(decode)(*inputs, **options)
            rows.sort(key=lambda row: row.index)
            sequences = request.assemble(input_ids, [row.new for row in rows])
            return ShapeOutput(sequences, stats, record)

        return steps()

    def _groups(self, request: Request) -> list[list[int]]:
        """The rows that are decoded together. Targets that can only verify chains do so for one row at a time."""
        lengths, switch = [len(prompt) for prompt in request.prompts], self.target.switch
        if switch is not None:
            switch.check(self.target, lengths, request.max_new_tokens)
        if self.support.mode == "chain":
            return [[row] for row in range(len(lengths))]
        return [list(range(len(lengths)))] if switch is None else switch.groups(lengths, request.max_new_tokens)

    def _pace(self, drafter: Drafter | None, steps: tuple[int, bool], by_times: bool) -> Pace | None:
        if drafter is None or self.fall_back is False or (self.fall_back is True and not by_times):
            return None
        past = self._experience.setdefault(steps, Experience())
        return Pace(past, None if self.fall_back is True else float(self.fall_back))


def _finish(steps: Steps, streamer: BaseStreamer | None) -> ShapeOutput:
    """All steps, told to a streamer that knows the prompt."""
    while True:
        try:
            _, tokens = next(steps)
        except StopIteration as done:
            if streamer is not None:
                streamer.end()
            return done.value
        if streamer is not None:
            streamer.put(torch.tensor(tokens))


def _draft_dtype(target: Target, device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies in it: a draft's rounding costs acceptance, never a token."""
    beside = device.type == target.device.type
    if beside and target.dtype != torch.float32:
        return target.dtype
    fast = device.type == "cuda" or (
        device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()  # type: ignore[attr-defined]
    )
    return torch.bfloat16 if fast else torch.float32


def is_language_model(source: str | Path, **hub: Any) -> bool:
    """Whether a predictor is a causal LM. What cannot be read is left to whoever reads it."""
    try:
        return AutoConfig.from_pretrained(bundled.resolve(str(source)), **hub).model_type != ShapeConfig.model_type
    except (OSError, ValueError, KeyError):
        return False


def _target_of(network: Predictor, source: str | Path) -> str:
    """Name of the target that a predictor was trained for."""
    if (known := network.config.target_identity) is None:
        raise TargetMismatch(f"predictor {source} does not say which target it was trained for; give it")
    return known["name"]


def load_predictor(source: str | Path, **hub: Any) -> Predictor:
    """An exported predictor of any kind in eval mode; `hub` as in ``ShapeDecoder.from_pretrained``.

    Raises:
        CheckpointError: nothing that can be read there, or weights that are not those of its configuration.
    """
    where = bundled.resolve(str(source))
    try:
        config = ShapeConfig.from_pretrained(where, **hub)
        found: Any = PREDICTORS[config.kind].from_pretrained(where, config=config, output_loading_info=True, **hub)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"predictor {source} cannot be read; give a folder written by shape.train or a hub id ({reason})"
        ) from error
    predictor, info = found
    # transformers would fill in what is missing at random, and every draft would be refused.
    if wrong := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
        raise CheckpointError(
            f"the weights of predictor {source} are not those of its configuration ({', '.join(wrong[:3])} missing or "
            "too many); it may be of another version of this package: train it anew"
        )
    return predictor.eval().requires_grad_(False)
