"""`shape.train` with FSDP on CPU processes: Lightning offers it on GPUs alone, and torch can do it over gloo too."""

import sys
from contextlib import AbstractContextManager

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import FSDPStrategy, fsdp
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.api import FullOptimStateDictConfig

import shape.cli.train


class OnCPU(FSDPStrategy):
    def _get_process_group_backend(self) -> str:
        return "gloo"

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


class Trainer(pl.Trainer):
    def __init__(self, *arguments, **options) -> None:
        if options.get("strategy") == "fsdp":
            options["strategy"] = OnCPU()
        super().__init__(*arguments, **options)


def full_state(module: torch.nn.Module, world_size: int, rank0_only: bool = True) -> AbstractContextManager:
    """Lightning's, but for the offloading to where the weights are already, which crashes torch 2.13."""
    return FullyShardedDataParallel.state_dict_type(
        module,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
    )


if __name__ == "__main__":
    pl.Trainer = Trainer  # type: ignore[misc]
    fsdp._get_full_state_dict_context = full_state
    shape.cli.train.main(sys.argv[1:])
