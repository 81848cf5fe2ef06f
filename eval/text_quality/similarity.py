"""How much alike two texts are, by an encoder that the user names: BERTScore and the cosine of mean-pooled states."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from shape import bundled
from shape.errors import ConfigError
from shape.target.loading import first_line

_BATCH = 16


@dataclass(frozen=True)
class Likeness:
    """Of a text and the one that it should be like, each at most 1.

    Attributes:
        precision, recall: BERTScore (arXiv 1904.09675, section 3): for precision the mean, over the tokens of the text,
            of the largest cosine with a token of the other, and for recall the other way round. Tokens count alike,
            special ones not, and nothing is rescaled, so that random text scores well above 0.
        sentence: cosine of the mean states (as in Sentence-BERT, arXiv 1908.10084).
    """

    precision: float
    recall: float
    sentence: float


def f1(precision: float, recall: float) -> float:
    """Their harmonic mean; 0 where that is undefined."""
    return 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0


class Encoder:
    """Contextual states of a text's tokens: the last layer of any Hugging Face encoder or decoder."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        self.model, self.tokenizer = model.eval().requires_grad_(False), tokenizer
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.longest = min(int(tokenizer.model_max_length), positions or int(tokenizer.model_max_length))
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token  # masked anyway

    @classmethod
    def load(cls, name: str, device: torch.device) -> "Encoder":
        """From a path, a hub id, or the name of a bundled target.

        Raises:
            ConfigError: nothing that can be used can be loaded from there.
        """
        try:
            where = bundled.resolve(name)
            model, tokenizer = AutoModel.from_pretrained(where), AutoTokenizer.from_pretrained(where)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"encoder {name} cannot be loaded; give the folder or the hub id of an encoder, with its tokenizer "
                f"({first_line(error)})"
            ) from error
        if model.config.is_encoder_decoder:
            raise ConfigError(f"encoder {name} is an encoder and a decoder in one; give one that is either")
        return cls(model.to(device), tokenizer)

    @torch.no_grad()
    def states(self, texts: Sequence[str]) -> list[Tensor]:
        """Of each text's tokens without special ones, (T, H) float32; texts too long for the encoder are cut."""
        found: list[Tensor] = []
        for start in range(0, len(texts), _BATCH):
            batch = self.tokenizer(
                list(texts[start : start + _BATCH]),
                padding=True,
                truncation=True,
                max_length=self.longest,
                return_special_tokens_mask=True,
                return_tensors="pt",
            ).to(self.model.device)
            special = batch.pop("special_tokens_mask").bool()
            hidden = self.model(**batch).last_hidden_state.float().cpu()
            own = (batch["attention_mask"].bool() & ~special).cpu()
            found += [row[kept] for row, kept in zip(hidden, own, strict=True)]
        return found

    def compare(self, texts: Sequence[str], others: Sequence[str]) -> list[Likeness]:
        """Each text with the one of the same number."""
        pairs = zip(self.states(texts), self.states(others), strict=True)
        return [likeness(one, other) for one, other in pairs]


def likeness(text: Tensor, other: Tensor) -> Likeness:
    """Of states (T, H) and (T', H). Where one has no token: 1 where the other has none either, else 0."""
    if not (len(text) and len(other)):
        same = float(len(text) == len(other))
        return Likeness(same, same, same)
    cosines = F.normalize(text, dim=-1) @ F.normalize(other, dim=-1).T
    sentence = F.cosine_similarity(text.mean(0), other.mean(0), dim=0)
    return Likeness(float(cosines.amax(1).mean()), float(cosines.amax(0).mean()), float(sentence))
