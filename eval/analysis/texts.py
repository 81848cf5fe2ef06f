"""What the analysis reads: states of answers, positions drawn from them, and predictions beside them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shape.data.encoding import Encoded
from shape.errors import DataError
from shape.features.extraction import compute_features
from shape.features.positions import eligible
from shape.features.store import Stored
from shape.generation.decoder import ShapeDecoder
from shape.networks.base import Known, Predictor
from shape.networks.teacher_forcing import Texts, examples, known_in
from shape.target.model import Target

_BATCH = 8


def texts_of(target: Target, encoded: Sequence[Encoded]) -> list[Stored]:
    """States of some texts, float32 and on the CPU."""
    found = []
    for start in range(0, len(encoded), _BATCH):
        batch = encoded[start : start + _BATCH]
        states = compute_features(target, batch).float().cpu()
        found += [
            Stored(one.input_ids, one.loss_mask, row[: len(one.input_ids)])
            for one, row in zip(batch, states, strict=True)
        ]
    return found


def answered(decoder: ShapeDecoder, prompts: Sequence[list[int]], max_new_tokens: int) -> Iterator[Encoded]:
    """The target's greedy answers to prompts, as texts of which the answers count."""
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device=decoder.target.device)
        text = decoder.generate(ids, max_new_tokens=max_new_tokens, do_sample=False)
        assert isinstance(text, Tensor)
        row = text[0].cpu()
        yield Encoded(str(number), row, torch.arange(len(row)) >= len(prompt))


def answer_positions(text: Stored, run: int) -> Tensor:
    """Positions t whose states h_t..h_{t+run-1} all predict tokens of one answer, (R,) int64."""
    predicts = text.loss_mask[1:]
    if len(predicts) < run:
        return torch.empty(0, dtype=torch.int64)
    return predicts.unfold(0, run, 1).all(-1).nonzero()[:, 0]


def drawn_positions(counts: Sequence[int], positions: int, seed: int) -> list[Tensor]:
    """Which of so many positions of each text are drawn: at most `positions` of all together."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randperm(sum(counts), generator=generator)[:positions].sort().values
    ends = torch.tensor([0, *counts]).cumsum(0)
    return [
        numbers[(numbers >= a) & (numbers < b)] - a for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]


def successive_states(texts: Sequence[Stored], last: int, positions: int, seed: int) -> Tensor:
    """(P, last + 1, H): h_t..h_{t+last} at positions drawn from all that stay within one answer."""
    found = [answer_positions(text, last + 1) for text in texts]
    parts = []
    for text, places, kept in zip(texts, found, drawn_positions([len(f) for f in found], positions, seed), strict=True):
        parts.append(text.hidden[places[kept][:, None] + torch.arange(last + 1)])
    states = torch.cat(parts)
    if not len(states):
        raise DataError(f"no answer has {last + 1} tokens in a row; give longer answers or smaller lags")
    return states


@dataclass(frozen=True)
class Predictions:
    """A predictor's states beside the target's, for roots drawn by seed.

    Attributes:
        predicted, true: (P, S, H) steps n = 0..S-1. mask: (P, S) bool, steps within the answer.
        tokens: (P, S) int64, along each path.
        read: what the predictor read, text by text: what is known, and embeddings (1, P', S, H).
    """

    predicted: Tensor
    true: Tensor
    mask: Tensor
    tokens: Tensor
    read: list[tuple[Known, Tensor]]

    @property
    def embeddings(self) -> Tensor:
        """(P, S, H), of the tokens along each path."""
        return torch.cat([embeddings[0] for _, embeddings in self.read])


@torch.no_grad()
def predictions(
    predictor: Predictor, target: Target, texts: Sequence[Stored], positions: int, seed: int
) -> Predictions:
    config = predictor.config
    roots = [eligible(text.loss_mask, torch.tensor([0, len(text.input_ids)])).nonzero()[:, 0] for text in texts]
    true, masks, tokens, read = [], [], [], []
    for text, places, kept in zip(texts, roots, drawn_positions([len(r) for r in roots], positions, seed), strict=True):
        if not len(kept):
            continue
        ids, mask, hidden = (part[None].to(target.device) for part in text)
        whole = Texts(hidden, ids, mask, places[kept][None].to(target.device))
        cut = examples(whole, config.window, config.num_steps, target.hidden_size, config.feature_size)
        read.append((known_in(predictor, target, whole, cut.window), predictor.embed(cut.tokens, target)))
        true.append(cut.states[0])
        masks.append(cut.mask[0])
        tokens.append(cut.tokens[0])
    if not read:
        raise DataError("no answer has two tokens in a row; give longer answers")
    return Predictions(unrolled(predictor, read), torch.cat(true), torch.cat(masks), torch.cat(tokens), read)


def unrolled(predictor: Predictor, read: Sequence[tuple[Known, Tensor]]) -> Tensor:
    """(P, S, H) float32."""
    return torch.cat([predictor.unroll(known, embeddings)[0] for known, embeddings in read]).float()


def common_support(p: Tensor, q: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """The tokens with most of p + q, (P, K), both distributions renormalised on them, and the mean mass kept."""
    tokens = (p + q).topk(min(size, p.shape[-1]), -1).indices
    p, q = p.gather(-1, tokens), q.gather(-1, tokens)
    kept = float((p.sum(-1) + q.sum(-1)).mean() / 2)
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True), tokens, kept
