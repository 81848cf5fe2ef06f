"""Hidden states from a running vLLM, by its `extract_hidden_states`, for targets that an engine runs better.

vLLM writes the states of a prompt, which is a whole conversation here, into a file that this process reads and deletes;
so both see one folder. Its layers are numbered as ours, in ascending order, but for the last block's, which it gives
before the final norm; the target's own norm makes h of it.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from shape.data.encoding import Encoded
from shape.data.endpoint import Endpoint, EndpointError, patiently
from shape.errors import FeatureStoreError
from shape.features.store import TOLERANCE
from shape.target.inference import relative_error
from shape.target.model import Target


class EngineStates:
    """What `compute_features` computes, asked of an engine.

    Args:
        endpoint: one engine, or several.
        target: as they serve it. Its norm is applied here, and one conversation of each engine is compared with its
            states.
    """

    def __init__(self, endpoint: Endpoint, target: Target) -> None:
        self.endpoint, self.target = endpoint, target
        self._checked: set[str] = set()  # URLs of servers

    def __call__(self, texts: Sequence[Encoded], layers: Sequence[int]) -> list[Tensor]:
        """States of each text, (T, layers * H) in the target's dtype, on its device.

        Raises:
            EndpointError: the engine gives none, or such as were not asked for.
            FeatureStoreError: they are not the target's.
        """
        # As the engine numbers them.
        numbers = [self.target.config.num_hidden_layers if layer == -1 else layer for layer in layers]
        self.endpoint.stopped.clear()
        with ThreadPoolExecutor(len(texts)) as threads:
            try:
                found = list(threads.map(partial(self._states, numbers=numbers), texts))
            finally:
                self.endpoint.stopped.set()  # one may be waiting for its server
        for text, (url, states) in zip(reversed(texts), reversed(found), strict=True):
            if url not in self._checked:
                self._check(url, text, states, layers, serve_flags(sorted(set(numbers))))
                self._checked.add(url)
        return [states for _, states in found]

    def _states(self, text: Encoded, numbers: Sequence[int]) -> tuple[str, Tensor]:
        """Which server gave them, and the states."""
        there, depth = sorted(set(numbers)), self.target.config.num_hidden_layers
        ids = text.input_ids.tolist()
        asking = partial(self.endpoint.post, "completions", {"prompt": ids, "max_tokens": 1})
        url, reply = patiently(asking, self.endpoint.stopped)
        try:
            path = json.loads(reply)["kv_transfer_params"]["hidden_states_path"]
        except (ValueError, LookupError, TypeError):  # no JSON, or of another kind
            path = None
        if not isinstance(path, str):
            raise EndpointError(f"endpoint {url} gives no hidden states; serve with {serve_flags(there)}")
        written = _read_and_delete(Path(path))
        states = written["hidden_states"].to(self.target.device, self.target.dtype)
        wanted = (len(ids), len(there), self.target.hidden_size)
        if states.shape != wanted or written["token_ids"].tolist() != ids:
            raise EndpointError(
                f"endpoint {url} gives states {tuple(states.shape)}, and {wanted} (tokens, layers, "
                f"width) are asked for; serve target {self.target.name} with {serve_flags(there)}"
            )
        found = dict(zip(there, states.unbind(1), strict=True))
        if depth in found:
            found[depth] = self.target.normed(found[depth])
        return url, torch.cat([found[number] for number in numbers], dim=-1)

    def _check(self, url: str, text: Encoded, states: Tensor, layers: Sequence[int], flags: str) -> None:
        """Compare with the target here, so that wrong layers or weights show at once."""
        own = self.target.features(text.input_ids[None].to(self.target.device), layers)[0]
        error, tolerance = relative_error(states, own), TOLERANCE[torch.bfloat16]
        if not error <= tolerance:
            raise FeatureStoreError(
                f"the states that endpoint {url} gives are not those of target {self.target.name} "
                f"(conversation {text.id} differs by {error:.1%}, at most {tolerance:.1%} is rounding); serve these "
                f"weights, with {flags}"
            )


def serve_flags(layers: Sequence[int]) -> str:
    """Options of `vllm serve` that let it give states of these layers, numbered as vLLM does."""
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "/dev/shm/states"},
    }
    return f"--speculative-config '{json.dumps(speculative)}' --kv-transfer-config '{json.dumps(transfer)}'"


def _read_and_delete(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that the engine has written, or is about to; the file is deleted."""
    import fcntl  # not on Windows, where vLLM is not either

    lock = Path(f"{path}.lock")
    try:
        with lock.open(encoding="utf-8") as waiting:
            fcntl.flock(waiting, fcntl.LOCK_SH)  # until the engine has written all of it
            tensors = load_file(path)
    except OSError as error:
        raise EndpointError(
            f"the engine wrote hidden states to {path}, which cannot be read here ({error}); run both on one machine, "
            "or give the engine a shared_storage_path that both see"
        ) from error
    path.unlink()
    lock.unlink()
    return tensors
