"""transformers as it comes: `model.generate`. See `protocol.py` for the command line."""

from importlib.metadata import version
from typing import Any

import torch

from eval.peers.scripts import protocol
from shape.evaluation.runner import Run, by_transformers
from shape.target.model import Target


def reply(run: Run) -> dict[str, Any]:
    """Of one prompt."""
    found: dict[str, Any] = {
        "tokens": run.sequences[0],
        "prefill_seconds": run.prefill_seconds,
        "decode_seconds": run.decode_seconds,
    }
    return found if run.stats is None else found | {"forwards": len(run.stats.steps)}


def serve(model: str, precision: str, threads: int) -> tuple[protocol.Answer, dict[str, str]]:
    torch.set_num_threads(threads)
    target = Target.load(model, dtype=precision, device_map="cpu", prepacked=False)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        generate = by_transformers(target, do_sample=False, max_new_tokens=request["new_tokens"])
        return reply(generate([request["prompt"]], [0]))

    return answer, {name: version(name) for name in ("transformers", "torch")}


if __name__ == "__main__":
    protocol.run(serve)
