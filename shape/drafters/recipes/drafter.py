"""Recipe packs: what the target writes again and again on a task, compiled from its own samples, looked up without a

The command is `shape.cli.recipes`.
"""

import gzip
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from shape.drafters.base import Committed, Drafter
from shape.drafters.growing import Paths
from shape.drafters.suffix import SuffixAutomaton
from shape.errors import CheckpointError, ConfigError, TargetMismatch
from shape.files import reading, typed, written_whole
from shape.target.loading import of_target
from shape.target.model import Target, TargetIdentity, announce
from shape.target.options import PlacedOptions
from shape.verification.sampling import Sampler
from shape.verification.tree import Drafted, TokenTree, ragged_tree

VERSION = 1
_KINDS = 4  # continuations kept of a prefix


class Recipe(NamedTuple):
    """So many times `tokens` followed `prefix`."""

    prefix: tuple[int, ...]
    tokens: tuple[int, ...]
    times: int


@dataclass(frozen=True)
class Pack:
    """Recipes of one target, the most frequent first.

    Attributes:
        target: identity of the target whose text they are.
        samples: answers per prompt that had to agree.
        prompts: how many there were.
    """

    target: TargetIdentity
    recipes: tuple[Recipe, ...]
    samples: int
    prompts: int

    def save(self, path: str | Path) -> None:
        """One compressed file that carries the hash of its content."""
        content = self._content()
        whole = json.dumps({"hash": _digest(content), **json.loads(content)}, separators=(",", ":"))
        with written_whole(Path(path)) as part:
            part.write_bytes(gzip.compress(whole.encode(), mtime=0))

    @classmethod
    def load(cls, path: str | Path) -> "Pack":
        """Raises CheckpointError: no pack, one of another version, or one that has been changed or cut."""
        with reading(f"pack {path}", CheckpointError, "give a file of `compile`"):
            values = json.loads(gzip.decompress(Path(path).read_bytes()))
            claimed, version = values.pop("hash"), values["version"]
            if version != VERSION:
                raise CheckpointError(f"pack {path} is of version {version}, and this is {VERSION}; compile it anew")
            pack = cls(
                TargetIdentity.from_dict(values["target"]),
                tuple(Recipe(tuple(prefix), tuple(tokens), count) for prefix, tokens, count in values["recipes"]),
                values["samples"],
                values["prompts"],
            )
        if claimed != pack.hash:
            raise CheckpointError(f"pack {path} is damaged: its content is not that of its hash; compile it anew")
        return pack

    @property
    def hash(self) -> str:
        return _digest(self._content())

    def _content(self) -> str:
        """The same text for the same pack."""
        values = {
            "version": VERSION,
            "target": self.target.to_dict(),
            "samples": self.samples,
            "prompts": self.prompts,
            "recipes": self.recipes,
        }
        return json.dumps(values, separators=(",", ":"))

    def require(self, target: Target, what: str = "the pack") -> None:
        """Raises TargetMismatch: recipes are token ids, and mean something to one tokenizer only."""
        mine, theirs = self.target, target.identity
        if mine.tokenizer_hash != theirs.tokenizer_hash or mine.vocab_size != theirs.vocab_size:
            raise TargetMismatch(
                f"{what} was compiled for target {mine.name}, and {theirs.name} has other tokens; compile one for it"
            )


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


# ------------------------------------------------------------------------------------------------- compiling


def agreed(samples: Sequence[Sequence[int]], shortest: int) -> Iterator[tuple[int, ...]]:
    """The longest stretches of the first sample, of at least so many tokens, that occur in all the others."""
    first, *others = samples
    automata = []
    for other in others:
        automaton = SuffixAutomaton()
        for token in other:
            automaton.extend(token)
        automata.append(automaton)
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


def recipes_of(stretches: Iterable[Sequence[int]], prefix: int, depth: int) -> Counter[tuple[tuple[int, ...], ...]]:
    """What follows each run of `prefix` tokens in agreed stretches, at most `depth` tokens: how often."""
    found: Counter[tuple[tuple[int, ...], ...]] = Counter()
    for stretch in stretches:
        for at in range(prefix, len(stretch)):
            found[tuple(stretch[at - prefix : at]), tuple(stretch[at : at + depth])] += 1
    return found


def pack_of(
    target: TargetIdentity,
    counts: Counter[tuple[tuple[int, ...], ...]],
    samples: int,
    prompts: int,
    most: int,
) -> Pack:
    """The most frequent recipes. What one says is left out where a longer one of the same prefix says it too."""
    by_prefix: dict[tuple[int, ...], list[Recipe]] = defaultdict(list)
    for (prefix, tokens), count in counts.items():
        by_prefix[prefix].append(Recipe(prefix, tokens, count))
    kept: list[Recipe] = []
    for recipes in by_prefix.values():
        whole: list[Recipe] = []
        for recipe in sorted(recipes, key=lambda each: (-len(each.tokens), -each.times, each.tokens)):
            longer = next((i for i, each in enumerate(whole) if each.tokens[: len(recipe.tokens)] == recipe.tokens), -1)
            if longer < 0:
                whole.append(recipe)
            else:
                whole[longer] = whole[longer]._replace(times=whole[longer].times + recipe.times)
        kept += sorted(whole, key=lambda each: (-each.times, each.tokens))[:_KINDS]
    kept.sort(key=lambda each: (-each.times, each.prefix, each.tokens))
    return Pack(target, tuple(kept[:most]), samples, prompts)


def merged(packs: Sequence[Pack], most: int = 15_000) -> Pack:
    """One pack that says what all say.

    Raises:
        TargetMismatch: they are of targets with other tokens.
    """
    first, counts = packs[0], Counter[tuple[tuple[int, ...], ...]]()
    for pack in packs:
        if pack.target.tokenizer_hash != first.target.tokenizer_hash:
            raise TargetMismatch(
                f"packs of {first.target.name} and {pack.target.name} have other tokens; merge packs of one target"
            )
        for recipe in pack.recipes:
            counts[recipe.prefix, recipe.tokens] += recipe.times
    return pack_of(first.target, counts, min(p.samples for p in packs), sum(p.prompts for p in packs), most)


# ------------------------------------------------------------------------------------------------- drafting


class RecipeDrafter(Drafter):
    """Looks up what follows the last tokens: as they are, or else by their shape.

    The shape of a prefix is the kinds of its tokens (word, number, space, and each mark by itself) but for the last
    one, which is taken literally: what follows a price in one record follows it in the next, if it did so more than
    once. Where a pack knows nothing, the place is written to a log, with what the target wrote there, for the next
    `compile`.

    Args:
        pack: the recipes.
        nodes: drafted nodes at most.
        misses: file for what was not found; None keeps none.
    """

    name = "recipes"

    def __init__(self, pack: Pack, nodes: int = 12, misses: str | Path | None = None) -> None:
        self.pack, self.nodes = pack, nodes
        self.misses = None if misses is None else Path(misses)

    def bind(self, target: Target) -> None:
        self.pack.require(target)
        self._prefix = max((len(recipe.prefix) for recipe in self.pack.recipes), default=1)
        self._kinds = kinds_of_tokens(target)
        self._literal: dict[tuple[int, ...], list[Recipe]] = defaultdict(list)
        shaped: Counter[tuple[tuple[int, ...], ...]] = Counter()
        for recipe in self.pack.recipes:  # the most frequent first
            self._literal[recipe.prefix].append(recipe)
            shaped[self._shape(recipe.prefix), recipe.tokens] += recipe.times
        self._shaped: dict[tuple[int, ...], list[Recipe]] = defaultdict(list)
        for (shape, tokens), times in shaped.most_common():
            if times > 1 and len(known := self._shaped[shape]) < _KINDS:
                known.append(Recipe(shape, tokens, times))

    def start(self, committed: Committed, hidden: Tensor) -> None:
        self._missed: list[int | None] = [None] * len(committed.texts)

    def select(self, rows: Tensor) -> None:
        self._missed = [self._missed[row] for row in rows.tolist()]

    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        if self.misses is not None:
            self._log(committed.texts)
        found = [self.lookup(text[-self._prefix :]) for text in committed.texts]
        self._missed = [len(text) if not rows else None for text, rows in zip(committed.texts, found, strict=True)]
        return ragged_tree(committed.root, [self._grown(recipes) for recipes in found])

    def lookup(self, prefix: Sequence[int]) -> list[Recipe]:
        """Recipes for the last tokens of a text, the most frequent first."""
        if len(prefix) < self._prefix:
            return []
        literal = self._literal.get(tuple(prefix))
        return literal or self._shaped.get(self._shape(prefix)) or []

    def _shape(self, prefix: Sequence[int]) -> tuple[int, ...]:
        return (*(self._kinds[token] for token in prefix[:-1]), prefix[-1])

    def _grown(self, recipes: Sequence[Recipe]) -> Drafted:
        """Their tokens as one tree, each likely by the share of what followed here."""
        total = sum(recipe.times for recipe in recipes) + 1
        paths = Paths(self.nodes)
        for recipe in recipes:
            paths.add(recipe.tokens, log(recipe.times / total))
        return paths.grown

    def _log(self, texts: Sequence[Sequence[int]]) -> None:
        lines = [
            json.dumps({"prefix": text[at - self._prefix : at], "tokens": text[at:]})
            for text, at in zip(texts, self._missed, strict=True)
            if at is not None and at >= self._prefix and len(text) > at
        ]
        if lines and self.misses is not None:
            with self.misses.open("a") as file:
                file.write("".join(f"{line}\n" for line in lines))


def kinds_of_tokens(target: Target) -> list[int]:
    """The kind of every token: a number for words, one for numbers, one for space, and one for each mark."""
    if target.tokenizer is None:
        return list(range(target.vocab_size))
    names: dict[str, int] = {}

    def kind(token: int) -> int:
        text = target.tokenizer.decode([token])
        bare = text.strip()
        name = "space" if not bare else "word" if bare.isalpha() else "number" if bare.isdecimal() else text
        return names.setdefault(name, len(names))

    return [kind(token) for token in range(target.vocab_size)]


# ------------------------------------------------------------------------------------------------- command


@dataclass(kw_only=True)
class CompileOptions(PlacedOptions):
    """What to compile a pack from.

    Attributes:
        target: path, hub id or bundled name of the target.
        prompts: JSON lines with turns, messages or prompt: of the task that the pack is for.
        output: the file to write.
        samples: answers per prompt that have to agree.
        temperature: of these samples.
        max_new_tokens: longest answer.
        prefix: tokens that are looked up.
        depth: longest continuation.
        most: recipes kept, the most frequent.
        chat_template_kwargs: given to the target's chat template, for example {"enable_thinking": false}.
        limit: at most so many prompts.
        misses: log of a drafter that used an earlier pack; what it says at least twice is taken in.
        seed: of the sampling.
        dtype: of the target.
    """

    target: str
    prompts: str
    output: str
    samples: int = 3
    temperature: float = 0.7
    max_new_tokens: int = 128
    prefix: int = 4
    depth: int = 12
    most: int = 15_000
    chat_template_kwargs: dict[str, Any] | None = None
    limit: int | None = None
    misses: list[str] = field(default_factory=list)
    seed: int = 0
    dtype: str | None = None

    def check(self) -> None:
        """Raises ConfigError for the first value out of range."""
        for name in ("samples", "max_new_tokens", "prefix", "depth", "most"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a positive number")
        if self.temperature < 0:
            raise ConfigError(f"temperature is {self.temperature}; give 0 or more")


def compile_pack(options: CompileOptions) -> Pack:
    """Answer the prompts, keep what their samples agree on, and write the pack."""
    from shape.data.conversations import evenly
    from shape.data.reading import load_prompts
    from shape.generation.decoder import ShapeDecoder

    options.check()
    prompts = load_prompts(Path(options.prompts), options.chat_template_kwargs)
    prompts = evenly(prompts, options.limit or len(prompts))
    misses = [miss for path in options.misses for miss in read_misses(path)]
    decoder = ShapeDecoder.from_pretrained(
        target=options.target, dtype=options.dtype, drafter="suffix", **of_target(options)
    )
    announce(decoder.target)
    target, counts = decoder.target, Counter[tuple[tuple[int, ...], ...]]()
    for number, prompt in enumerate(tqdm(prompts, desc="compile", unit="prompt")):
        ids = target.encode(prompt.opening, prompt.template)
        sampled: dict[str, Any] = {"do_sample": options.temperature > 0}
        if options.temperature > 0:
            sampled |= {"temperature": options.temperature, "top_k": 0, "num_return_sequences": options.samples}
        out = decoder.generate(
            ids, torch.ones_like(ids), max_new_tokens=options.max_new_tokens, seed=options.seed + number, **sampled
        )
        assert isinstance(out, Tensor)
        # The prompt's end belongs to it: recipes for how an answer begins.
        start = max(ids.shape[1] - options.prefix, 0)
        answers = [_until_end(row[start:], ids.shape[1] - start, target.eos_token_ids) for row in out.tolist()]
        counts += recipes_of(agreed(answers, options.prefix + 1), options.prefix, options.depth)
    counts += recipes_of(_repeated(misses, options.prefix), options.prefix, options.depth)
    pack = pack_of(target.identity, counts, options.samples, len(prompts), options.most)
    pack.save(options.output)
    return pack


def _until_end(tokens: Sequence[int], least: int, ends: Sequence[int]) -> list[int]:
    """Tokens up to the first end token behind the first `least`, which is the last one that counts."""
    at = next((at for at in range(least, len(tokens)) if tokens[at] in ends), len(tokens) - 1)
    return list(tokens[: at + 1])


def read_misses(path: str | Path) -> list[list[int]]:
    """What a drafter logged, prefixes and what followed in one.

    Raises:
        CheckpointError: no such log.
    """
    with reading(f"log {path}", CheckpointError, "give one that RecipeDrafter wrote"):
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
        return [typed(list[int], [*row["prefix"], *row["tokens"]]) for row in rows]


def _repeated(misses: Sequence[Sequence[int]], prefix: int) -> list[Sequence[int]]:
    """Those of which another one says the beginning too."""
    seen = Counter(tuple(miss[: prefix + 1]) for miss in misses)
    return [miss for miss in misses if len(miss) > prefix and seen[tuple(miss[: prefix + 1])] > 1]


def inspect(path: str | Path, show: int, target: Target | None) -> str:
    """What a pack holds, for people."""
    pack = Pack.load(path)
    tokens = sum(recipe.times * len(recipe.tokens) for recipe in pack.recipes)
    lines = [
        f"{path}: {len(pack.recipes):,} recipes of {pack.target.name}, {Path(path).stat().st_size / 1024:.0f} KB, "
        f"{pack.samples} samples of {pack.prompts} prompts, {tokens:,} tokens seen, sha256 {pack.hash[:12]}"
    ]
    for recipe in pack.recipes[:show]:
        told = [repr(_text(part, target)) for part in (recipe.prefix, recipe.tokens)]
        lines.append(f"{recipe.times:6d}  {told[0]} -> {told[1]}")
    return "\n".join(lines)


def _text(tokens: Sequence[int], target: Target | None) -> Any:
    return list(tokens) if target is None or target.tokenizer is None else target.tokenizer.decode(list(tokens))
