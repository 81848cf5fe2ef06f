"""MTP: the layer that targets such as Qwen3.5 were trained with to predict one more token (DeepSeek-V3, arXiv
2412.19437, section 2.2), applied to its own outputs for more.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shape.networks.decoder import DraftLayer, norm_of
from shape.networks.eagle import EaglePredictor


class MtpPredictor(EaglePredictor):
    """Position i reads h_i, as it enters the output embedding, and the embedding of x_{i+1}; its output drafts x_{i+2}
    and is the next position's h where the true one is unknown.

    Weights, their names and what is computed are those of Qwen3-Next and Qwen3.5, whose files have them under `mtp.`
    (compared in tests/networks/test_mtp.py): both inputs are normalised each by itself and joined by one matrix (their
    equation 21), the layer is one of the target's own, with its attention (gated, partly rotary) and its experts.
    Training unrolls it as EAGLE.
    """

    kind = "mtp"
    feeds_normed = True

    def _add_inputs(self, layer: PreTrainedConfig) -> DraftLayer:
        size = self.config.hidden_size
        self.pre_fc_norm_hidden = norm_of(layer, size)
        self.pre_fc_norm_embedding = norm_of(layer, size)
        self.fc = nn.Linear(2 * size, size, bias=False)
        return DraftLayer(layer)

    def fused(self, features: Tensor) -> Tensor:
        return features.to(self.fc.weight.dtype)

    def _joined(self, feature: Tensor, embedding: Tensor) -> Tensor:
        """(..., H) twice -> (..., H)."""
        embedding = self.pre_fc_norm_embedding(embedding.to(feature.dtype))
        return self.fc(torch.cat([embedding, self.pre_fc_norm_hidden(feature)], dim=-1))
