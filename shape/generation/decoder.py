"""ShapeDecoder: ``generate`` with the meaning of ``model.generate``, several tokens per target forward."""

from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, overload

import torch
from huggingface_hub import HfApi
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    TextGenerationPipeline,
)
from transformers.generation.streamers import BaseStreamer

from shape.drafters import Drafter, TreeShape
from shape.drafters.lengths import DraftLength
from shape.errors import ConfigError, UnsupportedGeneration
from shape.generation import streams
from shape.generation.engine import Engine, Pieces, ShapeOutput, finish
from shape.generation.fixed import FixedSteps, buckets
from shape.generation.loading import DrafterOptions, TargetSource, draft_length, load_pair
from shape.generation.pipeline import DraftingPipeline
from shape.generation.prefill import Memory
from shape.generation.request import Prepared, Request, Seed
from shape.generation.rules import Rule
from shape.generation.served import as_long_as_answers, ends_of
from shape.networks.export import export
from shape.target.chat import spoken
from shape.target.prepack import unpack

_EOS_AWARE_TOKENS = 4
_WARM_UP_TOKENS = 16  # enough for a few steps


class ShapeDecoder(Engine):
    """A target and a drafter, decoding together.

    Args:
        target: a causal LM from transformers, or a Target. The model decodes in evaluation mode and without gradients,
            and is otherwise left in the modes, and with the ``requires_grad``, that its owner gives it.
        drafter: a Drafter, which drafts for this target alone from now on, the name of one that needs no training
            ("ngram"), or None for autoregressive decoding in the same loop.
        tokenizer: the target's; only needed where text goes in or out.
        fall_back: decode autoregressively for a while where drafting does not pay, and on a CPU verify no more of a
            draft than is worth it (see ``generation.control``): by the times measured on the way. A number is an
            acceptance length below which drafting pauses; drafts are then verified whole, as with False, which always
            drafts. Reproducible calls (see ``generate``) measure no times and take ``FIXED_BREAK_EVEN`` for the number.
        graphs: decode in steps of fixed shapes, captured as CUDA graphs on a GPU, wherever a call allows it (see
            ``shape.generation.fixed``); a FixedSteps says how. None does so on a GPU.

    Raises:
        UnsupportedTarget: the target cannot be verified exactly (found out by a probe at this point).
        TargetMismatch: the drafter was made for another target.
    """

    @classmethod
    def from_pretrained(
        cls,
        source: TargetSource | None = None,
        /,
        target: TargetSource | None = None,
        tokenizer: Any = None,
        dtype: str | torch.dtype | None = None,
        device_map: Any = None,
        drafter: str | Sequence[str] | Drafter | None = None,
        tree: TreeShape | None = None,
        fall_back: bool | float = True,
        draft_device: str | torch.device | None = None,
        graphs: bool | FixedSteps | None = None,
        num_draft_tokens: str | int | DraftLength | None = None,
        pack: str | Path | None = None,
        prepacked: bool | None = None,
        *,
        predictor: str | Path | None = None,
        predictor_revision: str | None = None,
        misses: str | Path | None = None,
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
            drafter: "shape" (the default with a predictor; or its network's name: "medusa", "eagle3", "dflash",
                "dflash2", "dspark"), "model" (with a smaller LM), "mtp" (without a predictor the layer in the target's
                own files), a name among ``shape.drafters.DRAFTERS`` ("suffix" is the default without either), "none",
                or several, as a list or joined by "+", whose drafts are merged ("suffix+shape").
            tree: shape of the predictor's draft tree; None takes its own default.
            fall_back: see the class.
            graphs: see the class.
            draft_device: where the predictor drafts; None is beside the target.
            pack: file of recipes (see ``shape.drafters.recipes.drafter``), which by themselves are the drafter
                "recipes", and beside a predictor come before it.
            num_draft_tokens: drafted tokens in a row at most; None takes the drafter's own. A smaller LM also takes
                "adaptive" (its default), "cost", or one's own (see ``shape.drafters.lengths``).
                ``num_assistant_tokens`` and ``num_speculative_tokens``, as in transformers and vLLM, are the same.
            prepacked: see ``Target.load``; for the predictor too.
            predictor: folder, hub id or bundled name of an exported predictor, or of a smaller causal LM with the
                target's tokens, which then drafts.
            predictor_revision: of its hub repository.
            misses: file to which is added what the pack did not know.
            options: of the target, see ``Target.load``: revision, attn_implementation, quantization_config, ... Of
                them token, cache_dir, local_files_only, force_download and proxies also serve the predictor, and
                trust_remote_code a smaller LM.

        Raises:
            ConfigError: neither predictor nor target, a device that is not there, or an unknown option.
            CheckpointError: no predictor can be read there.
            TargetMismatch: predictor and target do not belong together.
            UnsupportedTarget: no target can be loaded from there, or none that can be verified exactly.
        """
        own, named = (drafter, "none") if isinstance(drafter, Drafter) else (None, drafter)
        if not isinstance(tree, TreeShape | None):
            raise ConfigError(f"tree is {tree!r}; give a TreeShape, for example TreeShape(depth=4, width=2)")
        if not isinstance(named, str | None) and not (
            isinstance(named, Sequence) and all(isinstance(name, str) for name in named)
        ):
            raise ConfigError(f"drafter is {named!r}; give a Drafter alone, or names")
        length = draft_length(options, num_draft_tokens)
        drafts = DrafterOptions(named, tree, draft_device, length, pack, misses)
        if own is not None and drafts != DrafterOptions("none"):
            raise ConfigError(
                "tree, draft_device, num_draft_tokens, pack and misses are of drafters that are made here; set them on "
                f"the {type(own).__name__} at hand, or give a name"
            )
        options |= {"tokenizer": tokenizer, "dtype": dtype, "device_map": device_map}
        loaded, chosen = load_pair(source, target, predictor, drafts, predictor_revision, prepacked, **options)
        made = cls(loaded, own or chosen, fall_back=fall_back, graphs=graphs)
        made._made_target, made._made_drafter = loaded is not source and loaded is not target, own is None
        return made

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the predictor as a folder that ``from_pretrained`` and ``custom_generate`` read: weights in the dtype
        that it drafts in, configuration, model card.

        Raises:
            ConfigError: the drafter has no predictor.
        """
        predictor = None if self.drafter is None else self.drafter.predictor
        if predictor is None:
            name = "none" if self.drafter is None else self.drafter.name
            raise ConfigError(f"drafter {name!r} has no predictor to save; save the decoder of a trained one")
        if self.drafter is not None and self.drafter.tree is not None:
            predictor.config.draft = asdict(self.drafter.tree)
        export(predictor, directory, self.target.identity, predictor.config.training or {})

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | None = None, **options: Any
    ) -> str:
        """``save_pretrained`` into a repository of the hub, which is made if need be.

        Args:
            options: of ``huggingface_hub.HfApi.upload_folder``: commit_message, revision, create_pr, ...

        Returns:
            The address of the commit.
        """
        hub = HfApi(token=token)
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            whole = hub.create_repo(repo_id, private=private, exist_ok=True).repo_id  # of a bare name with the user's
            return str(hub.upload_folder(repo_id=whole, folder_path=folder, **options))

    def close(self) -> None:
        """Take from the model, and from a drafter that was loaded here, what was attached to them (prepacked layers),
        and forget captured steps.

        The model stays as usable as it was. The decoder cannot be used afterwards, and a target's memory is freed as
        soon as nothing refers to it, without waiting for garbage collection. A Target that was handed over may serve
        other decoders, and has a ``close`` of its own; so has a FixedSteps. A ``with`` block closes its decoder too.
        """
        if self._made_target:
            self.target.close()
        for network in self.drafter.networks if self.drafter is not None and self._made_drafter else ():
            unpack(network)
        if self.graphs is not None and self._made_graphs:
            self.graphs.close()
        self.graphs, self._closed = None, True

    def __enter__(self) -> "ShapeDecoder":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        target, drafter = self.target, "none" if self.drafter is None else str(self.drafter)
        return (
            f"ShapeDecoder(target={target.name!r}, drafter={drafter!r}, dtype={target.precision!r}, "
            f"device={target.places!r}, fall_back={self.fall_back!r})"
        )

    @property
    def tokenizer(self) -> Any:
        return self.target.tokenizer

    def warm_up(self, *, batch_size: int = 1, prompt_length: int = 1, **options: Any) -> None:
        """Decode part of a throw-away answer, so that costs that are paid once fall on no real one: on a machine the
        compilation of CPU loops (some seconds), in a process that of steps of fixed shapes, their capture for every
        batch size up to the given one, and first touches of memory.

        Args:
            batch_size, prompt_length: the largest that answers will have.
            options: as answers will have them: those of ``generate``. For steps of fixed shapes max_new_tokens is one
                of them, for they are made for texts of so many tokens.
        """
        if wrong := [size for size in (batch_size, prompt_length) if type(size) is not int or size < 1]:
            raise ConfigError(f"batch_size and prompt_length are numbers of at least 1, and one is {wrong[0]!r}")
        # Reproducible, so that later calls learn nothing from the times of these steps.
        options = {"max_new_tokens": _WARM_UP_TOKENS, **options, "seed": 0, "reproducible": True}
        if not any(map(options.get, ("min_new_tokens", "min_length", "eos_aware"))):  # else there are steps as well
            options["eos_token_id"] = []
        for rows in [batch_size] if self.graphs is None else buckets(batch_size):
            given = torch.zeros(rows, prompt_length, dtype=torch.int64, device=self.target.device)
            pieces = self._start(given, torch.ones_like(given), warming=True, **options)
            for _ in islice(pieces, rows * _WARM_UP_TOKENS):
                pass
            pieces.close()

    @overload
    def generate(self, *inputs: Any, return_dict_in_generate: Literal[False] = False, **options: Any) -> Tensor: ...

    @overload
    def generate(self, *inputs: Any, return_dict_in_generate: Literal[True], **options: Any) -> ShapeOutput: ...

    @overload
    def generate(self, *inputs: Any, return_dict_in_generate: bool, **options: Any) -> Tensor | ShapeOutput: ...

    def generate(  # type: ignore[misc]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        inputs: Tensor | None = None,
        streamer: BaseStreamer | None = None,
        return_dict_in_generate: bool | None = None,
        **options: Any,
    ) -> Tensor | ShapeOutput:
        """Continue the prompts, with the meaning of ``model.generate``.

        Greedy output equals the target's own. Sampled output has the target's distribution and, at the same
        seed, is the same for every drafter and tree, autoregressive decoding included.

        Args:
            input_ids: (B, L) int64, padded on either side where attention_mask is 0.
            attention_mask: (B, L); None infers padding from the pad token as transformers does.
            generation_config: None takes the target's; options given by name override it.
            inputs: another name of input_ids, as for transformers.
            seed: of the sampling noise, one integer (also numpy's or torch's), whose samples depend on a prompt's place
                in the batch too, or one per prompt; None draws one from torch's global generator.
            reproducible: whether drafts, and so the sizes of forwards, depend on this call alone (and its session), and
                not on the clock or earlier calls: the same call on the same machine then gives the same tokens in every
                dtype. None does so where a seed is given. Without it two runs in bfloat16 may differ where two tokens
                are nearly as likely. Samples of rules that depend on the drafts always are.
            streamer: gets the prompt, then new tokens as they are committed; one sequence only. Ended on errors too.
            acceptance: a rule, or its name among ``shape.generation.rules.RULES``: "match"; "rejection", "traversal"
                and "transport", lossless too, whose samples depend on the drafter as well as on the seed; the lossy
                "typical-lossy" (Medusa's) and "trs-lossy" (the paper's), whose parameters TypicalLossy(...) and
                TrsLossy(...) take, and "unverified-lossy" (the drafter alone).
            eos_aware: no end token among the first four: for targets that end an answer at once after an empty turn.
                The same as min_new_tokens=4.
            memory: see ``session``.
            num_draft_tokens: drafted tokens in a row at most, for this call; ``num_assistant_tokens`` and
                ``num_speculative_tokens`` are the same.
            trace: record what became of every token (see ``shape.generation.trace``).
            options: those of ``model.generate`` that greedy search and sampling have (see
                ``shape.generation.served``), prepared by transformers itself; also logits_processor, stopping_criteria
                and prefix_allowed_tokens_fn. These see one prompt as it is given, as in transformers, and each of
                several without padding; criteria get int64 ids on the target's device. A processor with a state of its
                own (a grammar's) serves one sequence, by rule "match", "rejection" or "transport", without a trace.

        Raises:
            UnsupportedGeneration: an option, an input of the model, a token or a prompt that cannot be served, before
                anything is computed.
        """
        with streams.ended(streamer):
            if inputs is not None and input_ids is not None:
                raise UnsupportedGeneration("the prompt is given twice, as inputs and as input_ids; give one of them")
            prompt: Any = inputs if input_ids is None else input_ids
            streaming = streamer is not None
            pieces = self._start(prompt, attention_mask, generation_config, streaming=streaming, **options)
            out = finish(pieces, prompt, streamer)
        if return_dict_in_generate is None:
            config = self.target.model.generation_config if generation_config is None else generation_config
            return_dict_in_generate = config is not None and config.return_dict_in_generate
        return out if return_dict_in_generate else out.sequences

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> str:
        """The answer to a conversation, as text without special tokens or reasoning; ``stream`` gives both in pieces.

            decoder.chat("Book a table for two.")
            decoder.chat([{"role": "user", "content": "Book a table for two."}], do_sample=True, seed=1)

        Args:
            messages: the conversation so far, with roles as the chat template knows them; a text is the user's message.
            chat_template_kwargs: what the chat template is given beside the messages: `enable_thinking`, `tools`, ...
            options: those of ``generate``; where nobody says how long, an answer has 512 tokens at most,
                and 4,096 where the chat template has the target reason first.

        Raises:
            DataError: the target has no tokenizer, or its chat template refuses the messages.
            UnsupportedGeneration: as in ``generate``, or for several answers.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        ids = self.target.encode(messages, chat_template_kwargs)
        out = self.generate(ids, torch.ones_like(ids), **as_long_as_answers(self.target, ids, options))
        tokens, length = (out if isinstance(out, Tensor) else out.sequences)[0].tolist(), ids.shape[1]
        prompt, answer = tokens[:length], self.target.before_end(tokens[length:], ends_of(self.target, options))
        return spoken(answer, prompt, self.tokenizer, chat_template_kwargs)

    @overload
    def stream(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> Generator[list[int], None, None]: ...

    @overload
    def stream(
        self,
        input_ids: str | Sequence[Mapping[str, Any]],
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Generator[str, None, None]: ...

    def stream(
        self,
        input_ids: Any,
        attention_mask: Tensor | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Generator[list[int], None, None] | Generator[str, None, None]:
        """Continue one prompt, giving new tokens as they are committed: ids for ids, text for text.

        Decoding takes place in the loop that asks for more: leaving the loop ends it, and errors appear there. Several
        of one decoder may be open at a time.

        Args:
            input_ids: (1, L) int64, which yields lists of token ids, an end token included; or a text or the messages
                of a chat, which yields text in whole words, without special tokens.
            attention_mask: (1, L), with ids only.
            chat_template_kwargs: what the chat template is given beside the messages: `enable_thinking`, `tools`, ...
            options: those of ``generate`` but for streamer and those that say what to return; where nobody says how
                long, text is as long as in ``chat``.

        Raises:
            UnsupportedGeneration: as in ``generate``, before anything is computed.
            DataError: text for a target that has no tokenizer.
        """
        if isinstance(input_ids, Tensor):
            return streams.ids(self._start(input_ids, attention_mask, streaming=True, stepwise=True, **options))
        ids = self.target.encode(input_ids, chat_template_kwargs)
        options = as_long_as_answers(self.target, ids, {**options, "attention_mask": attention_mask})
        tokens = streams.ids(self._start(ids, torch.ones_like(ids), streaming=True, stepwise=True, **options))
        return streams.text(tokens, self.tokenizer)

    @overload
    def astream(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> AsyncGenerator[list[int], None]: ...

    @overload
    def astream(self, input_ids: str | Sequence[Mapping[str, Any]], **options: Any) -> AsyncGenerator[str, None]: ...

    def astream(
        self, input_ids: Any, attention_mask: Tensor | None = None, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """``stream`` for ``async for``: each step is computed in a worker thread, and the event loop stays free."""
        return streams.in_threads(self.stream(input_ids, attention_mask=attention_mask, **options))

    def pipeline(self, **options: Any) -> TextGenerationPipeline:
        """``transformers.pipeline("text-generation")`` of the target, decoding with drafts.

        Calls mean what they mean to transformers; they take all options of ``generate``, a streamer and the seed too.

        Args:
            options: those of ``TextGenerationPipeline``, for instance batch_size, or options for every call.

        Raises:
            ConfigError: the target has no tokenizer.
        """
        return DraftingPipeline(self.target, self.generate, **options)

    def session(self) -> Callable[..., Tensor | ShapeOutput]:
        """``generate`` for one conversation, turn after turn: what a prompt shares with the text before is not computed
        again.

            say = decoder.session()
            first = say(ids, max_new_tokens=64)
            second = say(torch.cat([first, more], dim=1), max_new_tokens=64)  # only `more` goes through the target

        Tokens are those of ``generate`` without a session, but for near-ties in bfloat16, which depend on how much goes
        through the target at a time. The cache lives as long as the session.
        """
        return partial(self.generate, memory=Memory())

    def as_custom_generate(self, streamer: BaseStreamer | None = None) -> Callable[..., Tensor | ShapeOutput]:
        """For calls of the target itself: ``model.generate(**inputs, custom_generate=decoder.as_custom_generate())``.

        It takes ``seed`` beside transformers' own options. What it cannot serve it refuses, inputs of the model too.
        transformers hands no ``streamer``, ``tokenizer`` or ``assistant_model`` to functions of others: a streamer
        would get the prompt alone and no end, stop strings need ``ShapeDecoder.generate`` or transformers'
        ``StopStringCriteria``, and the assistant, which changes no token, is not asked.

        Args:
            streamer: to be given here, not to ``model.generate``; gets the prompt, then tokens as they are committed.
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
                streaming = streamer is not None
                pieces = self._decode(request, ids, seed=seed, reproducible=seed is not None, streaming=streaming)
                out = finish(pieces, ids, streamer)
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
        stepwise: bool = False,
        acceptance: str | Rule = "match",
        eos_aware: bool = False,
        memory: Memory | None = None,
        trace: bool = False,
        warming: bool = False,
        **options: Any,
    ) -> Pieces:
        """A call of ``generate``, computed as it is iterated over; its mistakes are raised here.

        Args:
            streaming: who gets the tokens follows one sequence.
            stepwise: between steps the networks are in their owner's modes, who may use or change them.
            warming: this is a warm-up: drafters log no misses.
        """
        num_draft_tokens = draft_length(options)
        if num_draft_tokens is not None and (not isinstance(num_draft_tokens, int) or num_draft_tokens < 0):
            raise UnsupportedGeneration(f"num_draft_tokens is {num_draft_tokens!r}; a call takes a number from 0 on")
        request = Request.resolve(self.target, input_ids, attention_mask, generation_config, options)
        if eos_aware:
            request = replace(request, min_new_tokens=max(_EOS_AWARE_TOKENS, request.min_new_tokens))
        if memory is not None and len(request.prompts) > 1:
            raise UnsupportedGeneration(
                f"a session continues one text, and {len(request.prompts)} sequences were asked for; give each its own"
            )
        if reproducible is None:
            reproducible = seed is not None
        return self._decode(
            request, input_ids, seed=seed, reproducible=reproducible, streaming=streaming, stepwise=stepwise,
            acceptance=acceptance, memory=memory, trace=trace, num_draft_tokens=num_draft_tokens, warming=warming,
        )  # fmt: skip
