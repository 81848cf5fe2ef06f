"""Records what a vLLM server answers, for tests that need none: token ids of answers, and hidden states of prompts.

    VLLM_CPU_KVCACHE_SPACE=1 PYTHONPATH=. python -m eval.reference.engine serve     # in vLLM's environment
    python -m eval.reference.engine record                                          # in any other, meanwhile

It serves the shipped target on a CPU, where vLLM's own connector does not run (`eval.reference.cpu_states`).
"""

import fcntl
import json
import shutil
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "engine"
LAYERS = [3, 6]
PORT = 8155
PROMPTS = {
    "short": [1, 3276, 371, 527, 1572, 14, 288, 4755],
    "longer": [1, 3276, 371, 527, 1572, 14, 288, 4755, 345, 338, 331, 4110, 14, 324, 597, 360, 311, 932, 80, 319, 16],
}
CHATS: dict[str, dict[str, Any]] = {
    "greedy": {"messages": [{"role": "user", "content": "What is a good name for a cat?"}], "temperature": 0.0},
    "sampled": {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 1.0, "seed": 3},
}


def serve() -> None:
    """Replace this process by the server."""
    import os

    states = tempfile.mkdtemp(prefix="states-")
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}},
    }
    transfer = {
        "kv_connector": "CpuStates",
        "kv_connector_module_path": "eval.reference.cpu_states",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": states},
    }
    # Not `vllm serve`, whose command line asks for the metadata of a distribution called vllm, and this is vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(PORT), "--enforce-eager"]
    command += ["--model", str(ROOT / "checkpoints" / "quickstart-target"), "--served-model-name", "target"]
    command += ["--dtype", "float32", "--speculative-config", json.dumps(speculative)]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    os.execv(sys.executable, command)


def record() -> None:
    """Ask, and keep replies and states in the folder of fixtures."""
    FIXTURES.mkdir(parents=True, exist_ok=True)
    replies: dict[str, Any] = {"layers": LAYERS}
    for name, prompt in PROMPTS.items():
        body = {"prompt": prompt, "max_tokens": 1}
        reply = _post("completions", body)
        written = Path(reply["kv_transfer_params"]["hidden_states_path"])
        with open(f"{written}.lock", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            shutil.copyfile(written, FIXTURES / f"{name}.safetensors")
        reply["kv_transfer_params"]["hidden_states_path"] = f"{name}.safetensors"
        replies[name] = {"body": body, "reply": reply}
    for name, chat in CHATS.items():
        body = {**chat, "max_tokens": 48, "top_p": 1.0, "return_token_ids": True}
        replies[name] = {"body": body, "reply": _post("chat/completions", body)}
    (FIXTURES / "replies.json").write_text(json.dumps(replies) + "\n", encoding="utf-8")


def _post(path: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps({"model": "target", **body}).encode()
    request = urllib.request.Request(f"http://localhost:{PORT}/v1/{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return json.loads(reply.read())


if __name__ == "__main__":
    {"serve": serve, "record": record}[sys.argv[1]]()
