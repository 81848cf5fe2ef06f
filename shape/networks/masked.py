"""Parallel drafting: places behind the last token read a mask token, whose embedding is the target's or their own."""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from shape.errors import ConfigError
from shape.networks.decoder import DecoderPredictor
from shape.target.model import Target


class MaskedPredictor(DecoderPredictor):
    """Base of the networks that draft in places of mask tokens.

    Attributes:
        mask_embedding: (H,), the target's embedding of the mask token, which is no parameter; NaN until `complete`, so
            that forgetting it is loud. None with embeddings of its own, which have it.
    """

    mask_embedding: Tensor | None

    def _add_read_out(self, heads: int = 0) -> None:
        missing = torch.full((self.config.hidden_size,), torch.nan)
        self.register_buffer("mask_embedding", None if self.config.own_embeddings else missing)
        super()._add_read_out(heads)

    @torch.no_grad()
    def complete(self, target: Target) -> None:
        if self.mask_embedding is None or self.mask_embedding.isfinite().all():
            return
        if self.config.mask_token_id is None:
            raise ConfigError(
                "the predictor's mask_token_id is not set: give the token of the target that its mask places read"
            )
        token = torch.tensor(self.config.mask_token_id, device=target.device)
        self.mask_embedding.copy_(target.embed(token))

    @property
    def mask(self) -> Tensor:
        """(H,)."""
        if self.mask_embedding is not None:
            return self.mask_embedding
        assert self.embed_tokens is not None
        return self.embed_tokens.weight[self.config.mask_token_id]

    def masked(self, first: Tensor, places: int) -> Tensor:
        """A token's embedding and masks behind it: (..., H) -> (..., places, H)."""
        first = first.unsqueeze(-2)
        return torch.cat([first, self.mask.to(first).expand(*first.shape[:-2], places - 1, -1)], dim=-2)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.mask_embedding is not None:
            init.constant_(self.mask_embedding, torch.nan)
