"""What a process of several holds in its own memory of a target that they share; run by torchrun, for a folder."""

import json
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shape.target.model import Target
from shape.target.sharding import held, shard


def own_memory() -> int:
    """Bytes, without pages of files, which processes share and the system takes back where it needs them."""
    kilobytes = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert kilobytes is not None
    return 1024 * int(kilobytes[1])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    at_first = own_memory()
    target = Target.load(sys.argv[1], device_map="cpu", prepacked=False)
    loaded = own_memory() - at_first
    shard(target, mesh)
    after = own_memory() - at_first
    target.hidden(torch.tensor([[5, 6, 7]]))  # behind which each has its part alone again
    mine, whole = held(target)
    if dist.get_rank() == 0:
        print(json.dumps({"loaded": loaded, "after": after, "mine": mine, "whole": whole}))
    dist.destroy_process_group()
