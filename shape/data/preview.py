"""What a model would be trained on, printed with the supervised tokens coloured."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from rich.console import Console
from rich.text import Text
from transformers import AutoTokenizer

from shape import bundled
from shape.data.encoding import Encoded, encode_all
from shape.data.reading import load_conversations
from shape.errors import DataError


@dataclass(kw_only=True)
class PreviewOptions:
    """What to show.

    Attributes:
        data: conversations: a file, a folder, or a dataset on the hub (name[:split]).
        target: model whose tokenizer and chat template are used.
        n: conversations to print.
        max_length: tokens kept of each conversation.
        limit: rows that are read for the summary.
        skip_bad_rows: count malformed rows and continue.
        chat_template_kwargs: given to the target's chat template, for example {"enable_thinking": false}.
    """

    data: str
    target: str
    n: int = 3
    max_length: int = 2048
    limit: int = 1000
    skip_bad_rows: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


def preview(options: PreviewOptions) -> None:
    """Print some conversations and a summary. Raises DataError for what cannot be read."""
    conversations = load_conversations(
        options.data,
        limit=options.limit,
        skip_bad_rows=options.skip_bad_rows,
        chat_template_kwargs=options.chat_template_kwargs,
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(bundled.resolve(options.target))
    except (OSError, ValueError) as error:
        raise DataError(f"the tokenizer of {options.target} cannot be loaded: {str(error).splitlines()[0]}") from None
    encoded = encode_all(conversations, tokenizer, options.max_length, skip_bad_rows=options.skip_bad_rows)
    console = Console()
    for example in encoded.examples[: options.n]:
        supervised = int(example.loss_mask.sum())
        console.rule(Text(f"{example.id}: {len(example.input_ids)} tokens, {supervised} supervised"))
        text = Text()
        for ids, mark in _stretches(example):
            text.append(cast(str, tokenizer.decode(ids)), style="bold green" if mark else "dim")
        console.print(text, soft_wrap=True)
    tokens = sum(len(example.input_ids) for example in encoded.examples)
    share = sum(int(example.loss_mask.sum()) for example in encoded.examples) / tokens
    console.rule()
    console.print(
        f"{len(encoded.examples)} rows, {tokens} tokens, {share:.1%} supervised (coloured); {encoded.truncated} cut at "
        f"{options.max_length} tokens, {encoded.dropped} left out (nothing to supervise)",
        soft_wrap=True,
        highlight=False,
    )


def _stretches(example: Encoded) -> Iterator[tuple[list[int], bool]]:
    """Tokens with the same mask, decoded together so that multi-byte characters stay whole."""
    edges = torch.nonzero(example.loss_mask[1:] != example.loss_mask[:-1]).flatten() + 1
    parts = (torch.tensor_split(each, edges) for each in (example.input_ids, example.loss_mask))
    for ids, mask in zip(*parts, strict=True):
        yield ids.tolist(), bool(mask[0])
