"""ShapeDecoder: ``generate`` with the meaning of ``model.generate``, several tokens per target forward."""

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PretrainedConfig,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from shape import bundled
from shape.drafters import PREDICTORS, Drafter, ModelDrafter, TrainedDrafter, TreeShape, make_drafter
from shape.drafters.lengths import DraftLength
from shape.drafters.recipes.drafter import RecipeDrafter
from shape.drafters.recipes.pack import Pack
from shape.errors import CheckpointError, ConfigError, TargetMismatch, UnsupportedGeneration
from shape.files import reading, typed
from shape.generation import streams
from shape.generation.control import FIXED_BREAK_EVEN, SpeculationControl, StepCosts
from shape.generation.fixed import FixedSteps, why_not
from shape.generation.fixed import decode as decode_fixed
from shape.generation.loop import Memory, Row, decode
from shape.generation.pipeline import DraftingPipeline
from shape.generation.request import Prepared, Request, Seed
from shape.generation.rules import Rule, make_rule
from shape.generation.stats import DecodeStats
from shape.generation.trace import Trace
from shape.networks.base import Predictor
from shape.networks.config import ShapeConfig
from shape.target.inference import each_step, evaluating, gradientless
from shape.target.loading import FILE_OPTIONS, SOURCE, first_line, only, resolve_device
from shape.target.model import Target, TargetIdentity
from shape.target.prepack import prepack
from shape.target.support import Support
from shape.verification.probe import support_of

_EOS_AWARE_TOKENS = 4
_WARMING = 16  # tokens, enough for a few steps
_WITHOUT_TRAINING = "suffix"  # drafts for a target alone


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
        target: a causal LM from transformers, or a Target. The model decodes in evaluation mode and without gradients,
            and is otherwise left in the modes, and with the ``requires_grad``, that its owner gives it.
        drafter: a Drafter, the name of one that needs no training ("ngram"), or None for plain decoding in the
            same loop.
        tokenizer: the target's; only needed where text goes in or out.
        fall_back: decode autoregressively for a while where drafting does not pay (``shape.generation.control``): by
            the times measured while decoding, or where the acceptance length is below a given number. False always
            drafts. Reproducible calls (see ``generate``) measure no times and take ``FIXED_BREAK_EVEN`` for the number.
        graphs: decode in steps of fixed shapes, captured as CUDA graphs on a GPU, wherever a call allows it (see
            ``shape.generation.fixed``); a FixedSteps says how. Off by default: it has not been run on a GPU yet.

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
        with evaluating([self.target.model]):
            if self.drafter is not None:
                self.drafter.bind(self.target)
            self.support: Support = support_of(self.target)
        self.gradientless = gradientless(self._networks)
        self.fall_back = fall_back
        self.graphs = (FixedSteps() if graphs else None) if isinstance(graphs, bool) else graphs
        self._step_costs: dict[tuple[int, bool], StepCosts] = {}  # by number of rows, and whether by fixed steps
        self._made_target = not isinstance(target, Target)
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path | PreTrainedModel | Target | None = None,
        /,
        target: str | Path | PreTrainedModel | Target | None = None,
        tokenizer: Any = None,
        dtype: str | torch.dtype | None = None,
        device_map: Any = None,
        drafter: str | Sequence[str] | None = None,
        tree: TreeShape | None = None,
        fall_back: bool | float = True,
        draft_device: str | torch.device | None = None,
        graphs: bool | FixedSteps = False,
        lookahead: str | int | DraftLength = "adaptive",
        pack: str | Path | None = None,
        prepacked: bool | None = None,
        *,
        predictor: str | Path | None = None,
        predictor_revision: str | None = None,
        **options: Any,
    ) -> "ShapeDecoder":
        """A decoder from a target, from an exported predictor, or from both.

            from_pretrained("Qwen/Qwen3-0.6B")  # a target, which the drafter "suffix" serves
            from_pretrained("Qwen/Qwen3-0.6B", predictor="checkpoints/mine")
            from_pretrained("checkpoints/mine")  # a predictor, which knows its target
            from_pretrained("checkpoints/mine", target="Qwen/Qwen3-0.6B")
            from_pretrained("Qwen/Qwen3-0.6B", target="Qwen/Qwen3-8B")  # a smaller model drafts

        Args:
            source: the target, where a predictor or nothing else is named; else the predictor. Whether something is a
                predictor is read from its configuration.
            target: path, hub id or bundled name of the target, or a model at hand; None takes ``source``, or the one
                that the predictor was trained for.
            dtype: of the target; None keeps the checkpoint's own.
            device_map: see ``Target.load``.
            drafter: "shape" (the default with a predictor), "model" (with a smaller LM), a name among
                ``shape.drafters.DRAFTERS`` ("suffix" is the default without either), "none", or several, as a list or
                joined by "+", whose drafts are merged ("suffix+shape").
            tree: shape of the predictor's draft tree; None takes its own default.
            fall_back: see the class.
            graphs: see the class.
            draft_device: where the predictor drafts; None is beside the target.
            pack: file of recipes (see ``shape.drafters.recipes.drafter``), which by themselves are the drafter
                "recipes", and beside a predictor come before it.
            lookahead: of a smaller LM: "adaptive", "cost", a number of tokens, or one's own (see
                ``shape.drafters.lengths``).
            prepacked: see ``Target.load``; for the predictor too.
            predictor: folder, hub id or bundled name of an exported predictor, or of a smaller causal LM with the
                target's tokens, which then drafts.
            predictor_revision: of its hub repository.
            options: of the target, see ``Target.load``: revision, attn_implementation, quantization_config, ... Of
                them token, cache_dir, local_files_only, force_download and proxies also serve the predictor, and
                trust_remote_code a smaller LM.

        Raises:
            ConfigError: neither predictor nor target, a predictor for a drafter that takes none, a device that is not
                there, or an unknown option.
            CheckpointError: no predictor can be read there.
            TargetMismatch: predictor and target do not belong together.
            UnsupportedTarget: no target can be loaded from there, or none that can be verified exactly.
        """
        options = {name: value for name, value in options.items() if value is not None}
        hub, code = only(SOURCE, options), only({"trust_remote_code"}, options)
        if predictor_revision is not None:
            hub["revision"] = predictor_revision
        predictor, target = _pair(source, target, predictor, hub, options)
        device = None if draft_device is None else resolve_device(draft_device)
        name = drafter if drafter is None or isinstance(drafter, str) else "+".join(drafter)
        parts = [] if name is None else name.split("+")
        trained = name is None or not {"shape", "model"}.isdisjoint(parts)
        if predictor is None and target is None:
            raise ConfigError("neither a predictor nor a target is given; give at least one of them")
        if predictor is None and name is not None and trained:
            raise ConfigError(f"drafter {name!r} needs a predictor; give the folder of an exported one")
        if pack is None and "recipes" in parts:
            raise ConfigError(f"drafter {name!r} needs a pack; give a file of `python -m shape.recipes compile`")
        given: dict[str, Drafter] = {}
        if pack is not None:
            given["recipes"] = RecipeDrafter(Pack.load(pack))
        network, model = None, predictor is not None and is_language_model(predictor, **hub)
        if predictor is not None and not model:
            network = load_predictor(predictor, **hub)
            target = target or _target_of(network, predictor)
        if target is None:
            raise ConfigError(f"{predictor} is a language model, which drafts for any with its tokens: give a target")
        if not isinstance(target, str | Path):  # these are the predictor's alone, then
            options = {name: value for name, value in options.items() if name not in {*SOURCE, *code}}
        loaded = Target.load(
            target, tokenizer=tokenizer, dtype=dtype, device_map=device_map, prepacked=prepacked, **options
        )
        where = device or loaded.device
        if network is not None and trained:
            network = network.to(where, _draft_dtype(loaded, where))  # type: ignore[arg-type]
            prepack(network, prepacked)
            given["shape"] = TrainedDrafter(network, tree)
        elif predictor is not None and trained:
            small = Target.load(
                predictor, dtype=_draft_dtype(loaded, where), device_map=where, prepacked=prepacked, **code, **hub
            )
            given["model"] = ModelDrafter(small, lookahead)
        chosen = make_drafter(name or "+".join(given) or _WITHOUT_TRAINING, given)
        made = cls(loaded, chosen, fall_back=fall_back, graphs=graphs)
        made._made_target = loaded is not target
        return made

    def close(self) -> None:
        """Take from the model what was attached to it (prepacked layers), and forget captured steps.

        The model stays as usable as it was; the decoder is at its end. A Target that was handed over may serve other
        decoders, and has a ``close`` of its own. A decoder is closed at the end of a ``with`` block too.
        """
        if self._made_target:
            self.target.close()
        self.graphs, self._closed = None, True

    def __enter__(self) -> "ShapeDecoder":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def _networks(self) -> list[nn.Module]:
        """What it computes with."""
        return [self.target.model, *(() if self.drafter is None else self.drafter.networks)]

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
        # Reproducible, so that later calls learn nothing from the times of these steps.
        options |= {"max_new_tokens": _WARMING, "eos_token_id": [], "seed": 0, "reproducible": True}
        self.generate(given, torch.ones_like(given), **options)

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        seed: Seed | None = None,
        reproducible: bool | None = None,
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
            seed: of the sampling noise, one integer (also numpy's or torch's) or one per prompt; None draws one from
                torch's global generator.
            reproducible: whether what is drafted, and with it the sizes of forwards, depends on nothing but this call,
                neither on the clock nor on earlier calls: then the same call on the same machine gives the same tokens
                in every dtype. None does so where a seed is given. Without it two runs in bfloat16 may differ where two
                tokens are nearly as likely. Samples of rules that depend on the drafts always are.
            streamer: gets the prompt, then new tokens as they are settled; one row only. It is ended on errors too.
            acceptance: a rule, or its name among ``shape.generation.rules.RULES``: "match"; "rejection" and
                "traversal", lossless too, whose samples depend on the drafter as well as on the seed; the lossy
                "typical-lossy" (Medusa's) and "trs-lossy" (the paper's), whose parameters TypicalLossy(...) and
                TrsLossy(...) take.
            eos_aware: no end token among the first four: for targets that end an answer at once after an empty turn.
                The same as min_new_tokens=4.
            memory: see ``session``.
            trace: record what became of every token (see ``shape.generation.trace``).
            options: those of ``model.generate`` that greedy search and sampling have (see
                ``shape.generation.request``), prepared by transformers itself; also logits_processor, stopping_criteria
                and prefix_allowed_tokens_fn. These see one prompt as it is given, as in transformers, and each of
                several without padding; criteria get int64 ids on the target's device.

        Raises:
            UnsupportedGeneration: an option, an input of the model, a token or a prompt that cannot be served, before
                anything is computed.
        """
        with streams.ended(streamer):
            steps = self._start(
                input_ids,
                attention_mask,
                generation_config,
                seed=seed,
                reproducible=reproducible,
                streaming=streamer is not None,
                acceptance=acceptance,
                eos_aware=eos_aware,
                memory=memory,
                trace=trace,
                **options,
            )
            out = _finish(steps, input_ids, streamer)
        return out if return_dict_in_generate else out.sequences

    @overload
    def stream(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> Iterator[list[int]]: ...

    @overload
    def stream(
        self,
        input_ids: str | Sequence[Mapping[str, Any]],
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[str]: ...

    def stream(
        self,
        input_ids: Any,
        attention_mask: Tensor | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[list[int]] | Iterator[str]:
        """Continue one prompt, giving new tokens as they are settled: ids for ids, text for text.

        Decoding takes place in the loop that asks for more: whoever leaves it ends the decoding, and errors appear
        there. Several streams of one decoder may be open at a time.

        Args:
            input_ids: (1, L) int64, which yields lists of token ids, an end token included; or a text or the messages
                of a chat, which yields text in whole words, without special tokens.
            attention_mask: (1, L), with ids only.
            chat_template_kwargs: what the chat template is given beside the messages: `enable_thinking`, `tools`, ...
            options: those of ``generate`` but for streamer and those that say what to return.

        Raises:
            UnsupportedGeneration: as in ``generate``, before anything is computed.
            DataError: text for a target that has no tokenizer.
        """
        if isinstance(input_ids, Tensor):
            return streams.ids(self._start(input_ids, attention_mask, streaming=True, **options))
        ids = self.target.encode(input_ids, chat_template_kwargs)
        tokens = streams.ids(self._start(ids, torch.ones_like(ids), streaming=True, **options))
        return streams.text(tokens, self.tokenizer)

    @overload
    def astream(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> AsyncIterator[list[int]]: ...

    @overload
    def astream(self, input_ids: str | Sequence[Mapping[str, Any]], **options: Any) -> AsyncIterator[str]: ...

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

    def as_custom_generate(self, streamer: BaseStreamer | None = None) -> Callable[..., Tensor | ShapeOutput]:
        """For those who call the target: ``model.generate(**inputs, custom_generate=decoder.as_custom_generate())``.

        It takes ``seed`` beside transformers' own options. What it cannot serve it refuses, inputs of the model too.
        transformers hands no ``streamer``, ``tokenizer`` or ``assistant_model`` to functions of others: a streamer
        would get the prompt alone and no end, stop strings need ``ShapeDecoder.generate`` or transformers'
        ``StopStringCriteria``, and the assistant, which changes no token, is not asked.

        Args:
            streamer: to be given here, not to ``model.generate``; gets the prompt, then new tokens as they are settled.
        """

        def decode_with_drafts(
            model: PreTrainedModel,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            seed: Seed | None = None,
            **inputs: Any,
        ) -> Tensor | ShapeOutput:
            with streams.ended(streamer):
                if model is not self.target.model:
                    raise UnsupportedGeneration(
                        "this decoder belongs to another model; call generate of its own target"
                    )
                prepared = Prepared(generation_config, logits_processor, stopping_criteria)
                request = Request.of_prepared(self.target, input_ids, inputs, prepared)
                ids = input_ids[:: request.samples]
                steps = self._carry_out(request, ids, seed, seed is not None, streamer is not None)
                out = _finish(steps, ids, streamer)
            return out if generation_config.return_dict_in_generate else out.sequences

        return decode_with_drafts

    def _start(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        seed: Seed | None = None,
        reproducible: bool | None = None,
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
        if reproducible is None:
            reproducible = seed is not None
        return self._carry_out(request, input_ids, seed, reproducible, streaming, acceptance, memory, trace)

    def _carry_out(
        self,
        request: Request,
        input_ids: Tensor,
        seed: Seed | None,
        reproducible: bool,
        streaming: bool = False,
        acceptance: str | Rule = "match",
        memory: Memory | None = None,
        trace: bool = False,
    ) -> Steps:
        if self._closed:
            raise UnsupportedGeneration("this decoder was closed, and generates no more; make a new one of its target")
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
        reproducible = reproducible or not rule.same_for_every_draft
        # Each call has its own: a stream may stay open while others decode.
        if drafter is not None:
            drafter = drafter.reproducible() if reproducible else copy(drafter)
        keys = request.keys(seed)
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
                    "control": self._control(drafter, (len(group), fixed is not None), reproducible),
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

        return each_step(evaluating(self._networks), steps())

    def _groups(self, request: Request) -> list[list[int]]:
        """The rows that are decoded together. Targets that can only verify chains do so for one row at a time."""
        lengths, switch = [len(prompt) for prompt in request.prompts], self.target.switch
        if switch is not None:
            switch.check(self.target, lengths, request.max_new_tokens)
        if self.support.mode == "chain":
            return [[row] for row in range(len(lengths))]
        return [list(range(len(lengths)))] if switch is None else switch.groups(lengths, request.max_new_tokens)

    def _control(
        self, drafter: Drafter | None, steps: tuple[int, bool], reproducible: bool
    ) -> SpeculationControl | None:
        if drafter is None or self.fall_back is False:
            return None
        least = None if self.fall_back is True else float(self.fall_back)
        if reproducible:
            return SpeculationControl(StepCosts(), FIXED_BREAK_EVEN if least is None else least)
        return SpeculationControl(self._step_costs.setdefault(steps, StepCosts()), least)


def _finish(steps: Steps, input_ids: Tensor, streamer: BaseStreamer | None) -> ShapeOutput:
    """All steps, told to a streamer behind the prompt."""
    if streamer is not None:
        streamer.put(input_ids.cpu())
    while True:
        try:
            _, tokens = next(steps)
        except StopIteration as done:
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


def _pair(
    source: str | Path | PreTrainedModel | Target | None,
    target: str | Path | PreTrainedModel | Target | None,
    predictor: str | Path | None,
    hub: dict[str, Any],
    options: dict[str, Any],
) -> tuple[str | Path | None, str | Path | PreTrainedModel | Target | None]:
    """Predictor and target, where the first argument may be either.

    Args:
        hub: where predictors are read from. options: where targets are.

    Raises:
        ConfigError: two of one kind.
        CheckpointError: what is given alone cannot be read.
    """
    if source is None:
        return predictor, target
    if predictor is not None:
        if target is not None:
            raise ConfigError(f"{source}, {target} and {predictor} are given; give one target and one predictor")
        return predictor, source
    if not isinstance(source, str | Path):
        if isinstance(target, PreTrainedModel | Target):
            raise ConfigError("two models at hand are given; give one, and the folder or hub id of a predictor")
        return target, source
    if target is None:
        for known in (only(FILE_OPTIONS, options), hub):
            try:
                predicts = _model_type(source, known) == ShapeConfig.model_type
            except Exception as error:  # damaged files have errors of many kinds
                reason = first_line(error)
            else:
                return (source, None) if predicts else (None, source)
        raise CheckpointError(
            f"{source} cannot be read; give the folder or hub id of a target, or of a predictor that shape.train wrote "
            f"({reason})"
        )
    return (target, source) if isinstance(target, str | Path) and _is_predictor(target, hub) else (source, target)


def _model_type(source: str | Path, hub: dict[str, Any]) -> str | None:
    """As its configuration says, of which no code is run."""
    return PretrainedConfig.get_config_dict(bundled.resolve(str(source)), **hub)[0].get("model_type")


def _is_predictor(source: str | Path, hub: dict[str, Any]) -> bool:
    try:
        return _model_type(source, hub) == ShapeConfig.model_type
    except Exception:  # as below
        return False


def is_language_model(source: str | Path, **hub: Any) -> bool:
    """Whether a predictor is a causal LM. What cannot be read is left to whoever reads it."""
    try:
        return _model_type(source, hub) not in (None, ShapeConfig.model_type)
    except Exception:  # damaged files have errors of many kinds
        return False


def _target_of(network: Predictor, source: str | Path) -> str:
    """Name of the target that a predictor was trained for."""
    if (known := network.config.target_identity) is None:
        raise TargetMismatch(f"predictor {source} does not say which target it was trained for; give it")
    return known["name"]


def load_predictor(source: str | Path, **hub: Any) -> Predictor:
    """An exported predictor of any kind in eval mode; `hub` says where it is read.

    Raises:
        CheckpointError: nothing that can be read there, weights that are not those of its configuration, or damage to
            either that can be seen.
    """
    where = bundled.resolve(str(source))
    with reading(f"predictor {source}", CheckpointError, "give a folder written by shape.train or a hub id"):
        config = ShapeConfig.from_pretrained(where, **hub)
        shape = typed(TreeShape, config.draft or {})
        if min(size for size in (shape.depth, shape.width, shape.branching, shape.nodes) if size is not None) < 1:
            raise ValueError(f"draft is {config.draft}")
        known = None if config.target_identity is None else TargetIdentity.from_dict(config.target_identity)
        found: Any = PREDICTORS[config.kind].from_pretrained(where, config=config, output_loading_info=True, **hub)
    predictor, info = found
    # transformers would fill in what is missing at random, and every draft would be refused.
    if wrong := sorted({*info["missing_keys"], *info["unexpected_keys"], *map(str, info["mismatched_keys"])}):
        raise CheckpointError(
            f"the weights of predictor {source} are not those of its configuration ({', '.join(wrong[:3])} missing or "
            "too many); it may be of another version of this package: train it anew"
        )
    vocabulary, size = predictor.draft_vocabulary, config.vocab_size if known is None else known.vocab_size
    strange = vocabulary is not None and bool((vocabulary < 0).any() or (size and (vocabulary >= size).any()))
    if strange or not all(bool(weight.isfinite().all()) for weight in predictor.parameters()):
        raise CheckpointError(
            f"the weights of predictor {source} are damaged: they hold numbers that are not finite, or tokens that the "
            "target has not; copy them again, or train it anew"
        )
    return predictor.eval().requires_grad_(False)
