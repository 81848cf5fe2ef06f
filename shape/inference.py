"""The mode that forwards run in where nothing is trained."""

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor, nn


def gradientless(networks: Iterable[nn.Module]) -> type[torch.inference_mode] | type[torch.no_grad]:
    """Makes contexts, or decorators, within which these are computed with and nothing is kept for gradients.

    ``torch.inference_mode`` where they bear with it: PyTorch then spares every operation the bookkeeping of views and
    versions, which takes a tenth of a small target's forward on a CPU (``python eval/forwards.py``). What is made
    there cannot be trained on. Weights of classes of their own (torchao's and quanto's, bitsandbytes', DTensor) may not
    bear with it (https://github.com/pytorch/pytorch/issues/170419): beside these it is ``torch.no_grad``.
    """
    weights = chain.from_iterable(chain(network.parameters(), network.buffers()) for network in networks)
    plain = all(type(weight) in (Tensor, nn.Parameter) for weight in weights)
    return torch.inference_mode if plain else torch.no_grad
