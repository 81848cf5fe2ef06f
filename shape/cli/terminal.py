"""What `shape generate` does: an answer, or a chat, in a terminal. Answers go to stdout, all else to stderr."""

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import TextStreamer
from transformers.utils.logging import disable_progress_bar

from shape.errors import ConfigError, DataError, ShapeError
from shape.evaluation.environment import Environment
from shape.files import prepare_file
from shape.generation.decoder import ShapeDecoder
from shape.generation.engine import ShapeOutput
from shape.generation.loading import needs_predictor
from shape.generation.options import GenerateOptions
from shape.generation.rules import Rule, make_rule
from shape.generation.stats import DecodeStats
from shape.generation.trace import STYLES, pieces, view
from shape.target.chat import require_unicode
from shape.target.loading import of_pair
from shape.target.model import announce


def answer(
    decoder: ShapeDecoder,
    messages: list[dict[str, Any]],
    options: GenerateOptions,
    say: Callable[..., Any] | None = None,
) -> ShapeOutput:
    """Answers a conversation, streaming to standard output unless the finished trace is to be shown.

    Targets without a chat template continue the bare text of the messages.

    Args:
        say: the session of the conversation; None computes all of it.
    """
    input_ids = decoder.target.encode(messages, options.chat_template_kwargs)
    room, longest = options.max_new_tokens, decoder.target.max_positions
    if say is not None and longest is not None:  # a chat grows, and its answers are seldom as long as they may be
        room = max(1, min(room, longest - input_ids.shape[1]))
    traced = options.show_draft or options.show_trace
    recorded = traced or options.trace is not None
    output = (say or decoder.generate)(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        streamer=None if traced else TextStreamer(decoder.tokenizer, skip_prompt=True, skip_special_tokens=True),
        return_dict_in_generate=True,
        trace=recorded,
        # Greedy answers that nobody looks into may look at the clock, and so are the fastest.
        reproducible=recorded or options.temperature > 0,
        max_new_tokens=room,
        **generation_options(options),
    )
    assert isinstance(output, ShapeOutput)
    return output


def generation_options(options: GenerateOptions) -> dict[str, Any]:
    """How tokens are chosen, in the words of ``ShapeDecoder.generate``."""
    given = {"seed": options.seed, "acceptance": rule_of(options), "eos_aware": options.eos_aware}
    if options.temperature == 0:
        return {**given, "do_sample": False}
    warped = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    return {**given, "do_sample": True, **warped}


def rule_of(options: GenerateOptions) -> Rule:
    """The acceptance rule. Raises `UnsupportedGeneration` where there is none of that name."""
    return make_rule(options.acceptance, options.typical_lossy, options.trs_lossy)


def coloured(tokenizer: Any, tokens: list[tuple[int, str]]) -> Text:
    """An answer in the colours of what became of its tokens, `Trace.emitted`."""
    parts = pieces(tokenizer, [token for token, _ in tokens])
    return Text.assemble(*((piece, STYLES[event]) for piece, (_, event) in zip(parts, tokens, strict=True)))


def report(stats: DecodeStats) -> str:
    """One line: what was emitted, how far each target forward went, and how fast."""
    rate = stats.emitted / stats.decode_seconds if stats.decode_seconds else 0.0
    drafter = stats.drafter if stats.lossless else f"{stats.drafter}, {stats.acceptance}"  # whose name says lossy
    return (
        f"{stats.emitted + 1} tokens, acceptance length {stats.acceptance_length:.2f} ({drafter}), "
        f"{rate:.0f} tokens/s after a prefill of {1e3 * stats.prefill_seconds:.0f} ms"
    )


def about(
    decoder: ShapeDecoder, messages: list[dict[str, Any]], options: GenerateOptions, stats: DecodeStats
) -> dict[str, Any]:
    """What a trace has to say about its call: question, target, drafter, rule, sampling, and the environment."""
    name = decoder.target.name
    return {
        "prompt": messages[-1]["content"],
        "target": Path(name).name if Path(name).exists() else name,  # not where it lies
        "dtype": decoder.target.precision,
        "drafter": stats.drafter,
        "acceptance": stats.acceptance,
        "lossless": stats.lossless,
        "temperature": options.temperature,
        "seed": options.seed,
        "environment": asdict(Environment.capture(decoder.target.device)),
    }


def chat(decoder: ShapeDecoder, options: GenerateOptions, console: Console) -> None:
    """Questions and answers until an empty line or the end of input."""
    messages, say = _system(options), decoder.session()
    _notes().print("An empty line ends the chat.", style="dim")
    while True:
        try:
            question = console.input("[bold]> [/]").strip()
        except EOFError:
            break
        if not question:
            break
        messages.append({"role": "user", "content": question})
        try:
            messages.append(_show(decoder, messages, options, console, say))
        except ShapeError as error:
            _notes().print(f"error: {error}", style="red")
            messages.pop()


def _show(
    decoder: ShapeDecoder,
    messages: list[dict[str, Any]],
    options: GenerateOptions,
    console: Console,
    say: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Answers on the screen, with the figures below; returns the answer as a message."""
    output, tokenizer, notes = answer(decoder, messages, options, say), decoder.tokenizer, _notes()
    tokens = output.sequences[0, -output.stats.emitted - 1 :]
    if options.trace is not None and output.trace is not None:
        number = sum(message["role"] == "user" for message in messages)  # a chat's answers have a file each
        path = Path(options.trace)
        path = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        output.trace.write(path, about(decoder, messages, options, output.stats), tokenizer)
    if options.show_trace and output.trace is not None:
        notes.print(view(output.trace.records, tokenizer.decode))
    if options.show_draft and output.trace is not None:
        console.print(coloured(tokenizer, output.trace.emitted()), soft_wrap=True)
    if options.show_draft or options.show_trace:
        notes.print(Text(" / ").join(Text(event, style=style) for event, style in STYLES.items()))
    cut, last = "", decoder.target.max_positions
    if int(tokens[-1]) not in decoder.target.eos_token_ids:
        if len(tokens) == options.max_new_tokens:
            cut = "; cut there, and --max_new_tokens gives more"
        elif last is not None and output.sequences.shape[1] >= last:
            cut = "; cut there, at the target's last position"
    notes.print(report(output.stats) + cut, style="dim", soft_wrap=True)
    return decoder.target.message(tokens.tolist(), options.chat_template_kwargs)


def _notes() -> Console:
    return Console(stderr=True, highlight=False, markup=False)


def _system(options: GenerateOptions) -> list[dict[str, Any]]:
    return [{"role": "system", "content": options.system}] if options.system else []


def load(options: GenerateOptions) -> ShapeDecoder:
    """The decoder of these options. With another drafter the predictor only names the target, if need be."""
    predictor = options.predictor if needs_predictor(options.drafter) or not options.target else None
    if predictor is None and options.target is None:
        predictor = "quickstart-shape"
    decoder = ShapeDecoder.from_pretrained(
        predictor=predictor,
        target=options.target,
        dtype=options.dtype,
        drafter=options.drafter,
        tree=options.tree,
        draft_device=options.draft_device,
        pack=options.pack,
        misses=options.misses,
        num_draft_tokens=options.num_draft_tokens,
        **of_pair(options),
    )
    if decoder.tokenizer is None:
        raise DataError(f"target {decoder.target.name} has no tokenizer; give a folder that has one")
    alone = predictor is None and options.drafter is None and options.pack is None
    drafter = getattr(decoder.drafter, "name", "none")
    told = f"; no predictor is given, so {drafter} drafts" if alone else ""
    if not getattr(decoder.tokenizer, "chat_template", None):
        told += "; it has no chat template, so the bare text is continued"
    announce(decoder.target, told)
    return decoder


def generate(options: GenerateOptions) -> None:
    """Answers one prompt (given, or from standard input), or chats where a terminal is attached."""
    rule = rule_of(options)  # an unknown one is reported before anything is loaded
    if options.misses is not None and not rule.lossless:
        raise ConfigError(f"misses are what the target writes, which {rule.name} does not; leave one of the two out")
    interactive = options.prompt is None and sys.stdin.isatty()
    try:
        prompt = options.prompt if options.prompt is not None or interactive else sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise DataError(f"standard input is not UTF-8 text ({error.reason})") from None
    if not interactive and not prompt:
        raise DataError("the prompt is empty; give --prompt TEXT, or text on standard input")
    require_unicode(prompt or "", "the prompt")
    if options.trace is not None:
        prepare_file(options.trace)
    disable_progress_bar()  # transformers', beside an answer
    decoder, console = load(options), Console(highlight=False)
    decoder.warm_up(**generation_options(options))  # the figures below an answer are about answers
    if interactive:
        chat(decoder, options, console)
    else:
        _show(decoder, [*_system(options), {"role": "user", "content": prompt or ""}], options, console)
