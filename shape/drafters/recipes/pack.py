"""Recipe packs: which tokens follow some others on a task, in one file that carries the hash of its content."""

import gzip
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shape.errors import CheckpointError, ConfigError, TargetMismatch
from shape.files import reading, written_whole
from shape.target.identity import TargetIdentity, tokenizer_hash
from shape.target.model import Target

VERSION = 1
CONTINUATIONS = 4  # continuations kept of a prefix


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
        with reading(f"pack {path}", CheckpointError, "give a file of `shape recipes compile`"):
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
    def prefix(self) -> int:
        """Tokens that are looked up."""
        return max((len(recipe.prefix) for recipe in self.recipes), default=1)

    @property
    def depth(self) -> int:
        """Of its longest continuation."""
        return max((len(recipe.tokens) for recipe in self.recipes), default=1)

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


# (prefix, tokens): how often the tokens followed the prefix
Counts = Counter[tuple[tuple[int, ...], ...]]


def recipes_of(stretches: Iterable[Sequence[int]], prefix: int, depth: int) -> Counts:
    """What follows each run of `prefix` tokens in agreed stretches, at most `depth` tokens: how often."""
    found = Counts()
    for stretch in stretches:
        for at in range(prefix, len(stretch)):
            found[tuple(stretch[at - prefix : at]), tuple(stretch[at : at + depth])] += 1
    return found


def pack_of(target: TargetIdentity, counts: Counts, samples: int, prompts: int, most: int) -> Pack:
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
        kept += sorted(whole, key=lambda each: (-each.times, each.tokens))[:CONTINUATIONS]
    kept.sort(key=lambda each: (-each.times, each.prefix, each.tokens))
    return Pack(target, tuple(kept[:most]), samples, prompts)


def merged(packs: Sequence[Pack], most: int = 15_000, more: Counts | None = None) -> Pack:
    """One pack that says what all say, and `more` recipes.

    Raises:
        TargetMismatch: they are of targets with other tokens.
        ConfigError: their recipes are for other numbers of tokens, of which one alone is looked up.
    """
    first, counts = packs[0], Counts(more)
    for pack in packs:
        if pack.target.tokenizer_hash != first.target.tokenizer_hash:
            raise TargetMismatch(
                f"packs of {first.target.name} and {pack.target.name} have other tokens; merge packs of one target"
            )
        for recipe in pack.recipes:
            counts[recipe.prefix, recipe.tokens] += recipe.times
    sizes = sorted({len(prefix) for prefix, _ in counts})
    if len(sizes) > 1:
        raise ConfigError(
            f"recipes for {sizes[0]} and for {sizes[-1]} tokens cannot be in one pack, which looks up one number of "
            "them; merge packs that were compiled with the same prefix"
        )
    return pack_of(first.target, counts, min(p.samples for p in packs), sum(p.prompts for p in packs), most)


def inspect(path: str | Path, show: int = 0, tokenizer: Any = None) -> str:
    """What a pack holds, for people; a tokenizer shows text for tokens.

    Raises:
        TargetMismatch: the tokenizer is another target's.
    """
    pack = Pack.load(path)
    if tokenizer is not None and tokenizer_hash(tokenizer) != pack.target.tokenizer_hash:
        raise TargetMismatch(
            f"pack {path} was compiled for {pack.target.name}, whose tokenizer is another one; give it"
        )
    tokens = sum(recipe.times * len(recipe.tokens) for recipe in pack.recipes)
    lines = [
        f"{path}: {len(pack.recipes):,} recipes of {pack.target.name}, {Path(path).stat().st_size / 1024:.0f} KB, "
        f"{pack.samples} samples of {pack.prompts} prompts, {tokens:,} tokens seen, sha256 {pack.hash[:12]}"
    ]
    for recipe in pack.recipes[:show]:
        told = [repr(_text(part, tokenizer)) for part in (recipe.prefix, recipe.tokens)]
        lines.append(f"{recipe.times:6d}  {told[0]} -> {told[1]}")
    return "\n".join(lines)


def _text(tokens: Sequence[int], tokenizer: Any) -> Any:
    return list(tokens) if tokenizer is None else tokenizer.decode(list(tokens))
