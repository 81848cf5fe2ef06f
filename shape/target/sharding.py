"""A frozen target that several processes hold together, for training beside one that no device can hold alone."""

import pytorch_lightning as pl
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shape.errors import UnsupportedTarget
from shape.target.model import Target


class ShardTarget(pl.Callback):
    """Cuts the target's blocks among a run's processes before it starts.

    Each process loads the target into its machine's memory first, and moves parts to its device block by block.

    Raises:
        UnsupportedTarget: the target does not say what its blocks are.
    """

    def __init__(self, target: Target) -> None:
        self.target = target

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        shard(self.target, init_device_mesh(trainer.strategy.root_device.type, (trainer.world_size,)))
        if trainer.is_global_zero:
            mine, whole = held(self.target)
            print(f"target: each process holds {mine / whole:.0%} of {whole / 1e9:.3g} billion weights", flush=True)


def shard(target: Target, mesh: DeviceMesh) -> None:
    """Leave every process of the mesh its part of each block (torch's `fully_shard`), gathered while it is computed.

    Embeddings and output layer, which training reads by itself, stay whole. From now on all processes have to run the
    same layers at the same time.
    """
    found = blocks(target.model)
    if not found:
        raise UnsupportedTarget(
            f"target {target.name} does not say what its blocks are (_no_split_modules), and cannot be shared out; "
            "store its features with --device_map auto instead"
        )
    for block in found:  # of each by itself torch would keep all weights until a backward, which never comes
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    target.sharded = True


def blocks(model: nn.Module) -> list[nn.Module]:
    """What a model says is computed as a whole (transformers' `_no_split_modules`)."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def held(target: Target) -> tuple[int, int]:
    """Weights in this process, and of the whole target."""
    mine = whole = 0
    for weight in target.model.parameters():
        whole += weight.numel()
        mine += weight.to_local().numel() if isinstance(weight, DTensor) else weight.numel()
    return mine, whole
