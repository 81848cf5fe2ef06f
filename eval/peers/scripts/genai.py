"""OpenVINO GenAI: `LLMPipeline` on the CPU, converted by optimum-intel. See `protocol.py` for the command line."""

import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from eval.peers.scripts import protocol

_WEIGHTS = {"float32": "fp32", "bfloat16": "fp16", "int8": "int8", "int4": "int4"}


def convert(source: str, destination: str, precision: str) -> None:
    program = Path(sys.executable).with_name("optimum-cli")
    # Some widths are no multiple of its 128.
    options = ("--group-size-fallback", "adjust") if precision == "int4" else ()
    command: Sequence[Any] = (
        program, "export", "openvino", "-m", source, "--task", "text-generation-with-past",
        "--weight-format", _WEIGHTS[precision], *options, destination,
    )  # fmt: skip
    subprocess.run(command, check=True)


def serve(model: str, precision: str, threads: int) -> tuple[protocol.Answer, dict[str, str]]:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    # Its defaults, but for threads; in float32 also the KV cache, which else has 8 bits, so that tokens can be equal.
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "CACHE_DIR": str(Path(model) / "compiled")}
    if precision == "float32":
        options |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    else:
        options["INFERENCE_PRECISION_HINT"] = "bf16"
    pipeline = genai.LLMPipeline(model, "CPU", **options)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        config = genai.GenerationConfig()
        config.max_new_tokens = request["new_tokens"]
        config.do_sample = False
        if request["end_tokens"]:
            config.stop_token_ids = set(request["end_tokens"])
        else:
            config.ignore_eos = True
        ids = np.array([request["prompt"]], dtype=np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        started = perf_counter()
        result = pipeline.generate(inputs, config)
        seconds = perf_counter() - started
        prefill = result.perf_metrics.get_ttft().mean / 1e3
        return {
            "tokens": [int(token) for token in result.tokens[0]],
            "prefill_seconds": prefill,
            "decode_seconds": seconds - prefill,
        }

    return answer, {name: version(name) for name in ("openvino-genai", "optimum-intel", "nncf")}


if __name__ == "__main__":
    protocol.run(serve, convert)
