"""OneDecode: a table from one token to the next, baked once from the target itself."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from shape.drafters.base import Committed, Drafter
from shape.drafters.growing import grow
from shape.target.model import Target
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree, ragged_tree

_PORTION = 256  # tokens whose logits are there at a time
_REMEMBERED = 16  # continuations of a token that texts are searched for


class OneDecodeDrafter(Drafter):
    """Looks up the target's likeliest next tokens after one token, whatever comes before it (the table of OTT-Decode,
    which calls several candidates per slot SWARM).

    The table covers a slice of the vocabulary, and drafting costs no forward. A token that is not in it, or whose best
    continuation is less likely than the threshold, ends the path.

    Args:
        vocabulary: the first so many tokens, which tokenizers made by merging pairs number by frequency.
        threshold: confidence below which nothing is proposed (the source's speculation threshold).
        candidates: continuations proposed per slot, the best ones.
        depth: longest path.
        nodes: drafted nodes at most.
        texts: token ids of texts to bake from: an entry is then the mean of what the target says at the token's
            occurrences. Without any, every token is read by itself, behind the beginning-of-text token if there is one.
    """

    name = "onedecode"

    def __init__(
        self,
        vocabulary: int = 2048,
        threshold: float = 0.45,
        candidates: int = 1,
        depth: int = 4,
        nodes: int = 16,
        texts: Iterable[Sequence[int]] = (),
    ) -> None:
        self.vocabulary, self.threshold, self.candidates = vocabulary, threshold, candidates
        self.depth, self.nodes, self.texts = depth, nodes, [list(text) for text in texts]

    def __str__(self) -> str:
        baked = f"baked from {len(self.texts)} texts" if self.texts else "baked from single tokens"
        return (
            f"onedecode, {self.vocabulary} tokens {baked}, threshold {self.threshold:g}, {self.candidates} candidates, "
            f"depth {self.depth}, {self.nodes} nodes"
        )

    @property
    def text_sizes(self) -> tuple[int, int]:
        return self.nodes, min(self.depth, self.nodes)

    def bind(self, target: Target) -> None:
        size = min(self.vocabulary, target.vocab_size)
        baked = bake_texts(target, size, self.texts) if self.texts else bake_tokens(target, size, self.candidates)
        self.table: dict[int, Mapping[int, float]] = {}
        for token, following in baked.items():
            best = sorted(following.items(), key=lambda one: -one[1])[: self.candidates]
            if best and best[0][1] >= self.threshold:
                self.table[token] = dict(best)

    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        def following(token: int) -> Mapping[int, float]:
            return self.table.get(token, {})

        drafts = [
            grow(text[-1], following, lambda _, token: token, nodes=self.nodes, depth=self.depth)
            for text in committed.texts
        ]
        return ragged_tree(committed.root, drafts)


@torch.no_grad()
def bake_tokens(target: Target, size: int, candidates: int) -> dict[int, dict[int, float]]:
    """The target's best continuations of each of the first tokens by itself, with their probabilities."""
    begin = getattr(target.tokenizer, "bos_token_id", None)
    baked: dict[int, dict[int, float]] = {}
    for tokens in torch.arange(size, device=target.device).split(_PORTION):
        rows = tokens[:, None]
        if begin is not None:
            rows = torch.cat([torch.full_like(rows, begin), rows], dim=1)
        best = target.logits(target.features(rows)[:, -1]).float().softmax(-1).topk(candidates)
        following = (
            dict(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )
        baked.update(zip(tokens.tolist(), following, strict=True))
    return baked


@torch.no_grad()
def bake_texts(target: Target, size: int, texts: Iterable[Sequence[int]]) -> dict[int, dict[int, float]]:
    """The mean of what the target says behind each of the first tokens, where these occur in texts."""
    sums: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    occurrences: dict[int, int] = defaultdict(int)
    for text in texts:
        states = target.features(torch.tensor([list(text)], device=target.device))[0]
        for tokens, some in zip(torch.tensor(list(text)).split(_PORTION), states.split(_PORTION), strict=True):
            best = target.logits(some).float().softmax(-1).topk(min(_REMEMBERED, target.vocab_size))
            for token, *row in zip(tokens.tolist(), best.indices.tolist(), best.values.tolist(), strict=True):
                if token < size:
                    occurrences[token] += 1
                    for following, probability in zip(*row, strict=True):
                        sums[token][following] += probability
    return {
        token: {following: total / occurrences[token] for following, total in found.items()}
        for token, found in sums.items()
    }
