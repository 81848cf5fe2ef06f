"""What a model would be trained on, printed with the supervised tokens coloured."""

from collections.abc import Iterator
from typing import cast

import torch
from rich.console import Console
from rich.text import Text

from shape.data.encoding import Encoded, encode_all
from shape.data.options import PreviewOptions
from shape.data.reading import conversations_of
from shape.errors import DataError, require
from shape.target.loading import read_config, read_tokenizer


def preview(options: PreviewOptions) -> None:
    """Print some conversations and a summary. Raises DataError for what cannot be read."""
    require(options, "n", least=0)
    require(options, "max_length", above=0)
    conversations = conversations_of(options)
    tokenizer = read_tokenizer(options.target, {})
    if tokenizer is None:
        read_config(options.target)  # which says so where there is no target at all
        raise DataError(f"there is no tokenizer in {options.target}; give a folder or a hub id that has one")
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
