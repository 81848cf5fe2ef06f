"""vLLM's connector that writes hidden states into files, without the CUDA streams of its copies."""

from pathlib import Path

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class _Done:
    """An event that has happened."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuStates(ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending: PendingSave) -> None:
        blocks = torch.tensor(pending.block_ids)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).clone()
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        tensors = {"hidden_states": states, "token_ids": pending.token_ids}
        self._write_tensors(tensors, _Done(), pending.filename, self._lock_fds.pop(pending.req_id, None))
        self._req_copy_events[pending.req_id] = _Done()
