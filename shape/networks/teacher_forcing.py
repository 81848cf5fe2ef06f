"""A predictor on texts that are known already: examples to train on, and drafts by teacher forcing.

What is read, and how, is what decoding reads; tests compare the two. Indexing as in `shape.networks.shape`: at root t
the states h_0..h_{t-1} are known, step n = 0, 1, ... predicts h_{t+n}.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shape.data.encoding import supervised_runs
from shape.features.positions import eligible
from shape.features.store import Stored
from shape.networks.base import Known, Predictor, known_at
from shape.networks.shape import windows
from shape.target.model import Target


class Texts(NamedTuple):
    """Texts, or the surroundings of single roots, and the roots in them.

    Attributes:
        hidden: (B, T, F) features of h_0..h_{T-1}, in the end h itself: of `ShapeConfig.target_layers`.
        input_ids, loss_mask: (B, T'), T' >= T, False past a text's end.
        roots: (B, P) int64; padded with 0, which is no root.
    """

    hidden: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    roots: Tensor

    @classmethod
    def whole(cls, hidden: Tensor, input_ids: Sequence[Tensor], loss_masks: Sequence[Tensor]) -> "Texts":
        """Texts of unequal length, each with all of its eligible roots; `hidden` is padded already."""
        # Beside a text of one token, which is left out again, as networks run for at least one.
        ids, masks = (
            pad_sequence([*texts, texts[0].new_zeros(1)], batch_first=True)[:-1] for texts in (input_ids, loss_masks)
        )
        starts = [eligible(mask, torch.tensor([0, len(mask)])).nonzero()[:, 0] for mask in loss_masks]
        starts = [roots if len(roots) else roots.new_zeros(1) for roots in starts]
        return cls(hidden, ids, masks, pad_sequence(starts, batch_first=True))


class Examples(NamedTuple):
    """What a predictor is trained on, for roots t and steps n = 0..S-1. `...` is (B, P).

    Attributes:
        window: (..., W, F) states h_{t-W}..h_{t-1}, zeros before the text.
        tokens: (..., S) int64, x_t..x_{t+S-1}, read where steps are conditioned on tokens.
        states: (..., S, H) true states h_t..h_{t+S-1}.
        mask: (..., S) bool, steps that count: x_t and all of x_{t+1}..x_{t+n+1} are supervised.
    """

    window: Tensor
    tokens: Tensor
    states: Tensor
    mask: Tensor


def examples(texts: Texts, window: int, steps: int, hidden_size: int, feature_size: int | None = None) -> Examples:
    """Cut examples out of texts; the windows are cut by the function that decoding uses.

    A root that is not eligible (`shape.features.positions.eligible`) gives an example whose mask is False throughout.

    Args:
        texts: the last `hidden_size` columns of their features are h.
        window: number W of states before the root.
        steps: number S of steps.
        feature_size: the first columns of their features, which are read; None reads all.
    """
    hidden, tokens, loss_mask, roots = texts
    batch = torch.arange(len(tokens), device=tokens.device)[:, None, None]
    ahead = roots[..., None] + torch.arange(steps + 1, device=roots.device)
    inside = ahead < tokens.shape[1]
    supervised = loss_mask[batch, ahead.clamp(max=tokens.shape[1] - 1)] & inside
    is_root = supervised[..., :1] & (roots >= 1)[..., None]
    states = hidden[batch, ahead[..., :-1].clamp(max=hidden.shape[1] - 1), -hidden_size:]
    return Examples(
        window=windows(hidden[..., :feature_size], roots, window),
        tokens=tokens[batch, ahead[..., :-1].clamp(max=tokens.shape[1] - 1)],
        states=states,
        mask=is_root & supervised[..., 1:].cumprod(-1).bool(),
    )


def known_in(predictor: Predictor, target: Target, texts: Texts, window: Tensor) -> Known:
    """What the network knows at the roots of texts; `window` is theirs."""
    known_ids = texts.input_ids[:, : texts.hidden.shape[1] + 1]
    embeddings = predictor.embed(known_ids, target) if predictor.memory_shapes else None
    if embeddings is not None and embeddings.shape[1] == texts.hidden.shape[1]:
        embeddings = F.pad(embeddings, (0, 0, 0, 1))  # behind the text's last token, which no root looks past
    features = texts.hidden[..., : predictor.config.feature_size]
    return known_at(predictor, features, embeddings, texts.roots, window)


class Reader:
    """Logits of a predictor's states, as decoding reads them: with its own head, or the target's for draftable tokens.

    With a draft vocabulary both distributions are restricted to it, as in EAGLE-3, which also saves most of the time.

    Args:
        dtype: that the target's head is read in; None is the predictor's for a draft vocabulary, else the target's.
    """

    def __init__(self, predictor: Predictor, target: Target, dtype: torch.dtype | None = None) -> None:
        self.predictor, self.target = predictor, target
        self.dtype = dtype or predictor.dtype
        vocabulary = predictor.draft_vocabulary
        if vocabulary is None and dtype not in (None, target.dtype):
            vocabulary = torch.arange(target.vocab_size)
        self.head = None if vocabulary is None else target.head_of(vocabulary.to(target.device), self.dtype)

    def frozen(self, states: Tensor) -> Tensor:
        """Logits of what can be drafted, (..., H) -> (..., K), by the target's head."""
        return self.target.logits(states.to(self.target.dtype if self.head is None else self.dtype), self.head)

    def __call__(self, states: Tensor, tokens: Tensor, embeddings: Tensor | None) -> Tensor:
        """The predictor's logits, (B, P, S, H) -> (B, P, S, K), along tokens (B, P, S) and their embeddings."""
        logits = self.predictor.before_bias(self._read(states), self.reduced_vocabulary())
        return self.predictor.bias(logits, self.predictor.reduced(tokens, embeddings, states))

    def at(
        self, chosen: tuple[Tensor, ...], states: Tensor, reduced: Tensor | None, vocabulary: Tensor | None = None
    ) -> Tensor:
        """The same of some steps alone, (N, K), chosen out of (..., S) step by step; without the bias of a selector,
        whose loss adds that where it is asked for.

        See `shape.training.losses.supervised`.

        Args:
            reduced: (..., S, rank), `Predictor.reduced` of the tokens and states. vocabulary: `reduced_vocabulary`.
        """
        predictor = self.predictor
        if predictor.config.coupling:  # which needs a step's neighbour
            logits = predictor.before_bias(self._read(states), vocabulary)[chosen]
        elif predictor.heads:
            logits = self.target.logits(states[chosen], partial(predictor.own_head_at, steps=chosen[-1]))
        else:
            logits = self.frozen(states[chosen])
        return predictor.bias(logits, None if reduced is None or predictor.selector is not None else reduced[chosen])

    def _read(self, states: Tensor) -> Tensor:
        """(B, P, S, H) -> (B, P, S, K)."""
        return self.target.logits(states, self.predictor.own_head) if self.predictor.heads else self.frozen(states)

    def reduced_vocabulary(self) -> Tensor | None:
        """(K, rank), what a Markov bias reads of the tokens that can be drafted, which a coupling needs."""
        return self.predictor.reduced(*self._draftable) if self.predictor.config.coupling else None

    @cached_property
    def _draftable(self) -> tuple[Tensor, Tensor]:
        """The tokens that can be drafted, (K,), and their embeddings, (K, H)."""
        vocabulary = self.predictor.draft_vocabulary
        if vocabulary is None:
            vocabulary = torch.arange(self.target.vocab_size, device=self.target.device)
        return vocabulary, self.predictor.embed(vocabulary, self.target)

    def greedy(self, known: Known, tokens: Tensor) -> Tensor:
        """The best drafts along true tokens, (B, P, S) int64, as numbers in the draft vocabulary."""
        predictor = self.predictor
        embeddings = predictor.embed(tokens, self.target).to(predictor.dtype) if predictor.reads_tokens else None
        known = known._replace(window=known.window.to(predictor.dtype))
        return self(predictor.unroll(known, embeddings, tokens.shape[-1]), tokens, embeddings).argmax(-1)


class Forced(NamedTuple):
    """The best drafts at every root of a text, each step along the text's own tokens.

    Attributes:
        roots: (P,) int64. drafts, true: (P, S) int64, for x_{t+1}..x_{t+S}. mask: (P, S) bool, within the answer.
    """

    roots: Tensor
    drafts: Tensor
    true: Tensor
    mask: Tensor

    @property
    def right(self) -> Tensor:
        """(P, S) bool."""
        return self.drafts == self.true


@torch.no_grad()
def forced_drafts(reader: Reader, text: Stored) -> Forced:
    """What a predictor drafts by teacher forcing on one text."""
    predictor, target = reader.predictor, reader.target
    config, vocabulary = predictor.config, predictor.draft_vocabulary
    ids, mask, hidden = text
    roots = eligible(mask, torch.tensor([0, len(ids)])).nonzero()[:, 0]
    whole = Texts(*(each[None].to(target.device) for each in (hidden, ids, mask, roots)))
    cut = examples(whole, config.window, config.num_steps, target.hidden_size, config.feature_size)
    best = reader.greedy(known_in(predictor, target, whole, cut.window), cut.tokens)[0]
    ahead = (roots[:, None] + torch.arange(1, config.num_steps + 1)).clamp(max=len(ids) - 1)
    return Forced(roots, (best if vocabulary is None else vocabulary[best]).cpu(), ids[ahead], cut.mask[0].cpu())


@torch.no_grad()
def teacher_forced(predictor: Predictor, target: Target, texts: Iterable[Stored]) -> tuple[int, int]:
    """Tokens and target forwards that decoding the answers of stored texts would take, without decoding them.

    Right for answers that the target itself wrote greedily, and for chains as deep as the predictor's steps. The
    first token of an answer comes from the prefill and counts on neither side; the ratio is the acceptance length.
    """
    reader = Reader(predictor, target)
    tokens = forwards = 0
    for text in texts:
        found = forced_drafts(reader, text)
        accepted = torch.zeros_like(text.input_ids)
        accepted[found.roots] = (found.right & found.mask).cumprod(-1).sum(-1)
        for first, last in supervised_runs(text.loss_mask):
            root, tokens = first, tokens + last - first
            while root < last:
                root, forwards = root + int(accepted[root]) + 1, forwards + 1
    return tokens, forwards
