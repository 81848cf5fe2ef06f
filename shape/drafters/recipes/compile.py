"""Compiling a pack: the stretches on which all of the target's sampled answers to a prompt agree.

What varies from one answer to the next is in no recipe, nor what was written where an answer failed verification
(Kolm's "recipe speculative decoding").
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, ones_like
from tqdm.auto import tqdm

from shape.data.backends import sampling, until_end
from shape.data.conversations import evenly_by_category
from shape.data.options import CompileOptions
from shape.data.reading import load_prompts
from shape.drafters.recipes.misses import read_misses, recipes_of_misses
from shape.drafters.recipes.pack import Counts, Pack, pack_of, recipes_of
from shape.drafters.recipes.verify import make_verify
from shape.drafters.suffix import SuffixAutomaton
from shape.errors import DataError
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

    A prompt counts where all of its answers pass ``options.verify``.

    Args:
        load: gives the target and ``ShapeDecoder.generate`` of it, once all files have been read.
    """
    verify = None if options.verify is None else make_verify(options.verify)
    prompts = evenly_by_category(load_prompts(options.prompts, options.chat_template_kwargs), options.limit)
    misses = [miss for path in options.misses for miss in read_misses(path)]
    target, generate = load()
    counts, refused = Counts(), 0
    samples = options.samples if options.temperature > 0 else 1
    encoded = [target.encode(prompt.opening, prompt.template) for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):  # before the first of many answers
        if target.max_positions is not None and ids.shape[1] + options.max_new_tokens > target.max_positions:
            raise DataError(
                f"prompt {prompt.id} of {options.prompts} has {ids.shape[1]} tokens, and with {options.max_new_tokens} "
                f"new ones exceeds the {target.max_positions} positions of target {target.name}; leave it out, or give "
                "a smaller max_new_tokens"
            )
    for number, (prompt, ids) in enumerate(zip(tqdm(prompts, desc="compile", unit="prompt"), encoded, strict=True)):
        how = {"max_new_tokens": options.max_new_tokens, "seed": options.seed + number, "num_return_sequences": samples}
        out: Tensor = generate(ids, ones_like(ids), **how, **sampling(options.temperature))
        if verify is not None:
            texts = [target.tokenizer.decode(row, skip_special_tokens=True) for row in out[:, ids.shape[1] :].tolist()]
            if not all(verify(prompt, text) for text in texts):
                refused += 1
                continue
        # The prompt's end belongs to it: recipes for how an answer begins.
        start, end = max(ids.shape[1] - options.prefix, 0), ids.shape[1]
        answers = [row[start:end] + until_end(row[end:], target.eos_token_ids) for row in out.tolist()]
        counts += recipes_of(agreed(answers, options.prefix + 1), options.prefix, options.depth)
    if refused:
        told = f"{refused} of {len(prompts)} prompts are left out: an answer to them did not pass {options.verify}"
        tqdm.write(told, sys.stderr)
    counts += recipes_of_misses(misses, options.prefix, options.depth)
    pack = pack_of(target.identity, counts, samples, len(prompts) - refused, options.most)
    pack.save(options.output)
    return pack
