"""DFlash2's convolutions within a block: around attention and feed-forward part a place also reads the places before.

Places of a block are predicted at once, so that a later one knows little of what an earlier one will say; a local look
back is what DFlash2 (Z Lab, 2026, https://inco.ai/blog/dflash2) adds to DFlash's layers.
"""

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shape.networks.decoder import DraftLayer
from shape.networks.layers import Memory


class GroupedConvolution(nn.Module):
    """Two depthwise convolutions over the places of a block: of what a part of a layer reads, and of what it makes.

    Each channel has a kernel of its own, to which every place adds what its input says, the same for all channels of a
    group. At first nothing is changed. Names, shapes and what is computed are those of speculators 0.9.

    Args:
        size: channels H.
        taps: places that are read, its own first.
        group: channels of a group, a divisor of H.

    Attributes:
        base_kernel: (2, taps, H), of both convolutions.
    """

    def __init__(self, size: int, taps: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.empty(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The input (..., S, H) as the part reads it, and the kernel for what it makes, (..., S, taps, H / group)."""
        taps = self.base_kernel.shape[1]
        here, behind = self.kernel_projection(x).unflatten(-1, (2, taps, -1)).unbind(-3)
        return convolved(x, self.base_kernel[0], here), behind

    def after(self, x: Tensor, kernel: Tensor) -> Tensor:
        """What the part makes, (..., S, H), with the kernel that `before` gave."""
        return convolved(x, self.base_kernel[1], kernel)


def convolved(x: Tensor, base: Tensor, added: Tensor) -> Tensor:
    """y_s = sum_n (base_n + added_{s,n}) x_{s-n}, for places s of a block before whose first all is 0.

    Args:
        x: (..., S, H). base: (taps, H). added: (..., S, taps, G), for each of G groups of neighbouring channels.
    """
    places, groups = x.shape[-2], added.shape[-1]
    grouped, terms = x.unflatten(-1, (groups, -1)), []
    for tap, own in enumerate(base.to(x.dtype).unflatten(-1, (groups, -1))):
        shifted = F.pad(grouped, (0, 0, 0, 0, tap, 0))[..., :places, :, :]
        terms.append(shifted * (own + added[..., tap, :, None]))
    return reduce(torch.add, terms).flatten(-2)


class ConvolvedLayer(DraftLayer):
    """A decoder layer with such convolutions around its attention and its feed-forward part.

    Args:
        config: of the layer. taps, group: of the convolutions.
    """

    def __init__(self, config: PreTrainedConfig, taps: int, group: int) -> None:
        super().__init__(config)
        self.attention_conv = GroupedConvolution(config.hidden_size, taps, group)
        self.mlp_conv = GroupedConvolution(config.hidden_size, taps, group)

    def over_blocks(
        self, x: Tensor, rotary: Tensor, memory: Memory, visible: Tensor | None, among: Tensor | None = None
    ) -> Tensor:
        seen, kernel = self.attention_conv.before(self.input_layernorm(x))
        x = x + self.attention_conv.after(self.attended(seen, rotary, memory, visible, among), kernel)
        seen, kernel = self.mlp_conv.before(self.post_attention_layernorm(x))
        return x + self.mlp_conv.after(self.mlp(seen), kernel)
