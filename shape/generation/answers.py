"""Answers of a target on this machine, or of a server, for regeneration."""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import torch

from shape.data.backends import Answer, Backend, Request, announce_sampling, sampling
from shape.data.endpoint import Endpoint, EndpointBackend
from shape.data.options import CompileOptions
from shape.data.reading import conversations_of
from shape.data.regeneration import Share, Summary, check_output, in_every_process, regenerate, require_prompts
from shape.errors import ConfigError, DataError
from shape.files import prepare_file, sole_writer
from shape.generation.decoder import ShapeDecoder
from shape.generation.options import RegenerationOptions
from shape.generation.prompts import side_by_side
from shape.target.chat import Message, answer_message, prompt_ids
from shape.target.identity import answering_as
from shape.target.loading import of_target


@dataclass
class LocalBackend:
    """A decoder.

    Attributes:
        decoder: with a drafter, which changes the time and not the answers, or without.
        max_new_tokens: longest answer, in tokens.
        temperature: of the sampled answers.
        max_length: tokens of a conversation that are learned from: prompts that reach it are not answered, and answers
            are cut there.
    """

    decoder: ShapeDecoder
    max_new_tokens: int = 512
    temperature: float = 1.0
    max_length: int | None = None
    concurrency: ClassVar[int] = 1
    # Tokens of a batch, prompts and longest answers, for which memory did not suffice.
    _too_many: float = field(default=inf, init=False, repr=False)

    def describe(self) -> dict[str, Any]:
        bound = {} if self.max_length is None else {"max_length": self.max_length}
        chosen = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
        return {**chosen, **bound, **answering_as(self.decoder.target)}

    def generate(self, requests: Sequence[Request]) -> list[Answer | DataError | None]:
        answers: list[Answer | DataError | None] = [None] * len(requests)
        for sampled in (False, True):
            prompts: dict[int, list[int]] = {}
            for index, request in enumerate(requests):
                if request.sampled == sampled:
                    try:
                        if (prompt := self._prompt(request)) is not None:
                            prompts[index] = prompt
                    except DataError as error:
                        answers[index] = error
            if prompts:
                seeds = [requests[index].seed for index in prompts]
                written = self._decode(list(prompts.values()), sampled, seeds)
                for (index, prompt), ids in zip(prompts.items(), written, strict=True):
                    answers[index] = self._answer(requests[index], prompt, ids[: self._room(prompt)])
        return answers

    def _prompt(self, request: Request) -> list[int] | None:
        """Token ids; None where nothing behind them would be learned from."""
        target = self.decoder.target
        if target.tokenizer is None:
            raise ConfigError(f"target {target.name} has no tokenizer; give a folder that has one")
        ids = prompt_ids(request.prompt, target.tokenizer, request.template)
        if self.max_length is not None and len(ids) >= self.max_length:
            return None
        room = None if target.max_positions is None else target.max_positions - self.max_new_tokens
        if not ids or (room is not None and len(ids) > room):
            raise DataError(
                f"a prompt of {len(ids)} tokens does not fit the {target.max_positions} positions of target "
                f"{target.name} with max_new_tokens {self.max_new_tokens}"
            )
        return ids

    def _room(self, prompt: list[int]) -> int:
        """Tokens of the longest answer to a prompt."""
        room = self.max_new_tokens if self.max_length is None else self.max_length - len(prompt)
        return min(self.max_new_tokens, room)

    def _decode(self, prompts: list[list[int]], sampled: bool, seeds: list[int]) -> list[list[int]]:
        """Together, or where an accelerator has no memory for that, the two halves one after the other."""
        input_ids, mask = side_by_side(prompts, self.decoder.target.device)
        count, longest = input_ids.shape
        most = max(map(self._room, prompts))
        tokens = count * (longest + most)
        if count == 1 or tokens < self._too_many:
            try:
                sequences = self.decoder.generate(
                    input_ids,
                    attention_mask=mask,
                    seed=seeds,
                    max_new_tokens=most,
                    **sampling(self.temperature if sampled else 0.0),
                )
            except torch.OutOfMemoryError:
                if count == 1:
                    raise
            else:
                assert isinstance(sequences, torch.Tensor)
                return sequences[:, longest:].tolist()
            self._too_many = tokens
            self._free()  # outside of the handler, whose error holds on to what it could not finish
            warnings.warn(
                f"no memory for {count} answers to prompts of up to {longest} tokens together; they are written in two "
                "halves, and so are later ones of as many tokens",
                stacklevel=2,
            )
        return [
            answer
            for part in (slice(count // 2), slice(count // 2, None))
            for answer in self._decode(prompts[part], sampled, seeds[part])
        ]

    def _free(self) -> None:
        if self.decoder.graphs is not None:
            self.decoder.graphs.close()
        if self.decoder.target.device.type == "cuda":
            torch.cuda.empty_cache()

    def _answer(self, request: Request, prompt: list[int], ids: list[int]) -> Answer:
        tokenizer, said = self.decoder.tokenizer, self.decoder.target.before_end(ids)
        finished = len(said) < len(ids)
        if isinstance(request.prompt, str):  # raw text has no reasoning to be taken apart
            text = tokenizer.decode(said, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            message = Message("assistant", text)
        else:
            message = answer_message(said, tokenizer, request.template)
        tokens = prompt, ids[: len(said) + 1]
        # A cut may fall inside a character, whose first bytes alone are no text.
        text = message.content if finished else message.content.rstrip("\ufffd")
        return Answer(text, finished, message.more, tokens)


def answering(options: RegenerationOptions | CompileOptions, drafter: str) -> ShapeDecoder:
    """A decoder for `sampling`, and a line that says what it leaves out of the target's own generation config."""
    decoder = ShapeDecoder.from_pretrained(
        target=options.target, dtype=options.dtype, drafter=drafter, **of_target(options)
    )
    announce_sampling(decoder.target, options.temperature)
    return decoder


def make_backend(options: RegenerationOptions) -> Backend:
    """The backend that the options ask for."""
    if options.endpoint is None:
        return LocalBackend(answering(options, "none"), options.max_new_tokens, options.temperature)
    return EndpointBackend.of(
        options.endpoint,
        options.model,
        options.concurrency,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
    )


def regenerate_from(options: RegenerationOptions) -> Summary | None:
    """What `shape regenerate` does, cheap checks first; None in processes other than the first."""
    check_output(Path(options.output))
    prepare_file(options.output)
    options.check()
    if (options.target is None) == (options.endpoint is None):
        raise ConfigError("give either target, to answer here, or endpoint and model, to ask a server")
    Endpoint.asked_for(options.endpoint, options.model)
    conversations = conversations_of(options, exclude_ids=options.exclude_ids, require_answers=False)
    require_prompts(conversations)
    # A target that was put on given devices is one process's.
    placed = options.device is not None or options.device_map is not None
    chosen = replace(options.trainer, devices=1, num_nodes=1) if placed else options.trainer
    trainer = replace(chosen, enable_progress_bar=False).for_extraction()
    if options.endpoint is None and not placed:
        options = replace(options, device_map=str(trainer.strategy.root_device))
    backend = make_backend(options)
    found: list[Summary | None] = []

    def work(share: Share) -> None:
        found.append(regenerate(conversations, backend, options.output, options, share=share))

    output = Path(options.output)
    alone = sole_writer(output.with_name(f".{output.name}.lock"), f"a regeneration into {output}")
    with alone if trainer.is_global_zero else nullcontext():
        if isinstance(backend, LocalBackend):
            in_every_process(work, trainer)
        elif trainer.is_global_zero:
            work(Share())
    return found[0] if found else None
