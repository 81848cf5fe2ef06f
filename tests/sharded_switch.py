"""States of a target that two processes share, where the texts of one need both rotary tables and those of the other
one; run by torchrun, for a folder.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shape.data.encoding import Encoded
from shape.features.extraction import compute_features
from shape.target.model import Target
from shape.target.sharding import shard

LENGTHS = [[9, 30, 24], [30, 41]]  # by process

if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    target = Target.load(sys.argv[1], device_map="cpu", prepacked=False)
    assert target.switch is not None and target.switch.positions == 24
    texts = [torch.arange(size) % 60 + 3 for size in LENGTHS[dist.get_rank()]]
    portion = [Encoded("", ids, torch.ones_like(ids, dtype=torch.bool)) for ids in texts]
    alone = compute_features(target, portion)
    shard(target, init_device_mesh("cpu", (dist.get_world_size(),)))
    together = compute_features(target, portion)
    for own, other, ids in zip(alone, together, texts, strict=True):
        torch.testing.assert_close(own[: len(ids)], other[: len(ids)])
    dist.barrier()
    dist.destroy_process_group()
