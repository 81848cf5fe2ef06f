"""Compiling a pack: the stretches on which all of the target's sampled answers to a prompt agree.

What varies from one answer to the next is in no recipe, nor what was written where an answer failed verification
(Kolm's "recipe speculative decoding").
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor, ones_like
from tqdm.auto import tqdm

from shape.data.backends import sampling, until_end
from shape.data.conversations import evenly_by_category
from shape.data.journal import AnswerJournal
from shape.data.options import CompileOptions
from shape.data.reading import load_prompts
from shape.drafters.recipes.misses import read_misses, recipes_of_misses
from shape.drafters.recipes.pack import Counts, Pack, pack_of, recipes_of
from shape.drafters.recipes.verify import make_verify
from shape.drafters.suffix import SuffixAutomaton
from shape.errors import DataError
from shape.files import sole_writer
from shape.target.identity import answering_as
from shape.target.model import Target


def agreed(samples: Sequence[Sequence[int]], shortest: int) -> Iterator[tuple[int, ...]]:
    """The longest stretches of the first sample, of at least so many tokens, that occur in all the others."""
    first, *others = samples
    automata = [SuffixAutomaton(other) for other in others]
    # matched[end]: how many tokens before `end` every other sample has in a row.
    places = [(0, 0)] * len(automata)
    matched = [0]
    for end, token in enumerate(first, 1):
        places = [each.follow(place, token) for each, place in zip(automata, places, strict=True)]
        matched.append(min((length for _, length in places), default=end))
    for end in range(1, len(first) + 1):
        ends_here = end == len(first) or matched[end + 1] <= matched[end]
        if ends_here and matched[end] >= shortest:
            yield tuple(first[end - matched[end] : end])


def compile_pack(options: CompileOptions, load: Callable[[], tuple[Target, Callable[..., Any]]]) -> Pack:
    """Answer the prompts, keep what their samples agree on, and write the pack.

    A prompt counts where all of its answers pass ``options.verify``. Answers are kept in ``options.output`` +
    ".partial" until the pack is written: a run that is interrupted, or whose verification fails, goes on from them.

    Args:
        load: gives the target and ``ShapeDecoder.generate`` of it, once all files have been read.

    Raises:
        DataError: a prompt has no room for its answer in the target's positions.
        ConfigError: answers are there that were begun with other settings, or another process compiles this pack.
    """
    verify = None if options.verify is None else make_verify(options.verify)
    prompts = evenly_by_category(load_prompts(options.prompts, options.chat_template_kwargs), options.limit)
    misses = [miss for path in options.misses for miss in read_misses(path)]
    target, generate = load()
    samples = options.samples if options.temperature > 0 else 1
    encoded = [target.encode(prompt.opening, prompt.template) for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):  # before the first of many answers
        if target.max_positions is not None and ids.shape[1] + options.max_new_tokens > target.max_positions:
            raise DataError(
                f"prompt {prompt.id} of {options.prompts} has {ids.shape[1]} tokens, and with {options.max_new_tokens} "
                f"new ones exceeds the {target.max_positions} positions of target {target.name}; leave it out, or give "
                "a smaller max_new_tokens"
            )
    output = Path(options.output)
    with sole_writer(output.with_name(f".{output.name}.lock"), f"a compilation of {output}"):
        settings = {
            "data": sha256(json.dumps([ids.tolist() for ids in encoded]).encode()).hexdigest(),
            "samples": samples,
            **{name: getattr(options, name) for name in ("max_new_tokens", "temperature", "seed")},
            **answering_as(target),
        }
        journal = AnswerJournal(output.with_name(f"{output.name}.partial"), settings)
        answered = _answered(target, generate, encoded, options, samples, journal)
        counts, refused = Counts(), 0
        for prompt, ids, answers in zip(prompts, encoded, answered, strict=True):
            if verify is not None:
                texts = [target.tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
                if not all(verify(prompt, text) for text in texts):
                    refused += 1
                    continue
            # The prompt's end belongs to it: recipes for how an answer begins.
            end = ids[0, -options.prefix :].tolist()
            stretches = agreed([end + answer for answer in answers], options.prefix + 1)
            counts += recipes_of(stretches, options.prefix, options.depth)
        if refused:
            told = f"{refused} of {len(prompts)} prompts are left out: an answer to them did not pass {options.verify}"
            tqdm.write(told, sys.stderr)
        counts += recipes_of_misses(misses, options.prefix, options.depth)
        pack = pack_of(target.identity, counts, samples, len(prompts) - refused, options.most)
        pack.save(output)
        journal.delete()
    return pack


def _answered(
    target: Target,
    generate: Callable[..., Any],
    prompts: Sequence[Tensor],
    options: CompileOptions,
    samples: int,
    journal: AnswerJournal,
) -> Iterator[list[list[int]]]:
    """So many answers to each prompt, (1, T), until their end; those in the journal are not asked for again."""
    known = {number: row["answers"] for number, row, *_ in journal.entries() if row is not None}
    with tqdm(desc="compile", unit="prompt", total=len(prompts), initial=len(known)) as bar:
        for number, ids in enumerate(prompts):
            if (answers := known.get(number)) is None:
                how = {"max_new_tokens": options.max_new_tokens, "seed": options.seed + number}
                how |= {"num_return_sequences": samples, **sampling(options.temperature)}
                out: Tensor = generate(ids, ones_like(ids), **how)
                answers = [until_end(row, target.eos_token_ids) for row in out[:, ids.shape[1] :].tolist()]
                journal.append([(number, {"answers": answers}, samples, None)])
                bar.update()
            yield answers
