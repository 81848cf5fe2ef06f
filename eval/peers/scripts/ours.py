"""ShapeDecoder, plain and with drafts. See `protocol.py` for the command line; methods are those of `systems.py`."""

from importlib.metadata import version
from typing import Any

import torch

from eval.peers.oracle import Charged, SteadyOracle, untrained_predictor
from eval.peers.scripts import protocol
from eval.peers.scripts.hugging_face import reply
from eval.peers.systems import CHARGED, PLAIN, PREDICTOR, draft_depth
from shape.drafters import Drafter
from shape.evaluation.runner import by_decoder
from shape.generation.decoder import ShapeDecoder

_QUANTISED = ("int8", "int4")


def load(model: str, precision: str, backend: str | None, **options: Any) -> ShapeDecoder:
    if precision in _QUANTISED:
        options["quantize"] = precision
    if backend is not None:
        options["backend"] = backend
    dtype = "bfloat16" if precision in _QUANTISED else precision
    return ShapeDecoder.from_pretrained(model, dtype=dtype, device_map="cpu", **options)


def serve(
    model: str, precision: str, threads: int, backend: str | None = None
) -> tuple[protocol.Answer, dict[str, str]]:
    torch.set_num_threads(threads)
    shipped = model.endswith("quickstart-target")
    drafts: dict[str, Any] = {"predictor": "quickstart-shape"} if shipped else {"drafter": "none"}
    loaded = load(model, precision, backend, **drafts)
    target, plain = loaded.target, ShapeDecoder(loaded.target)
    predictor = None if shipped else untrained_predictor(target)
    texts: dict[tuple[int, ...], list[int]] = {}  # plain answers behind their prompts, which the oracle foretells

    def decoder(request: dict[str, Any]) -> ShapeDecoder:
        method, prompt = request["method"], request["prompt"]
        if method in (PLAIN, PREDICTOR):
            return plain if method == PLAIN else loaded
        if tuple(prompt) not in texts:
            texts[tuple(prompt)] = prompt + answer(request | {"method": PLAIN})["tokens"]
        kind, length = method.split()
        depth = draft_depth(int(length))
        oracle: Drafter = SteadyOracle([texts[tuple(prompt)]], [len(prompt)], int(length), depth)
        if kind == CHARGED:
            assert predictor is not None
            oracle = Charged(predictor, oracle, depth)
        return ShapeDecoder(target, oracle, fall_back=False)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": request["new_tokens"]}
        # A seed alone would have whole drafts verified, so that no clock decides: users of the predictor give none.
        found = reply(by_decoder(decoder(request), reproducible=False, **options)([request["prompt"]], [0]))
        if request["method"] == PLAIN:
            texts[tuple(request["prompt"])] = request["prompt"] + found["tokens"]
        return found

    return answer, {name: version(name) for name in ("torch",)}


if __name__ == "__main__":
    protocol.run(serve)
