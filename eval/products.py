"""Products of weights with 1 to 512 tokens on this CPU: rows as in a checkpoint, oneDNN's blocks, and ours, in 8 and 4
bits too.

    python -m eval.products --output eval/results/products

Weights have the shapes of layers of SmolLM-135M, Qwen2.5-0.5B and Llama-3.2-1B. Unquantised, and for up to 64 tokens,
they are so many that they come from memory and not from a cache. All ways are run in every round, in a random order;
what counts is the lower quartile of the rounds.
"""

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from eval import commands
from shape.errors import ConfigError
from shape.evaluation.markdown import markdown, show
from shape.target import floats
from shape.target.loading import dtype_name
from shape.target.prepack import linear, onednn_multiplies
from shape.target.quantize import QuantizedLinear

SHAPES = ((576, 576), (1536, 576), (4864, 896), (8192, 2048))  # outputs, inputs
TOKENS = (1, 2, 4, 8, 13, 16, 32, 64, 256, 512)
BYTES = 300e6  # of weights that are gone through


@dataclass
class ProductsOptions:
    """How often to measure.

    Args:
        output: folder for products.json and products.md.
        rounds: of all weights, of whose times the lower quartile counts.
    """

    output: str = "products-results"
    rounds: int = 7


@dataclass(frozen=True)
class Line:
    """One way for one shape: microseconds by number of tokens."""

    outputs: int
    inputs: int
    dtype: str
    way: str
    microseconds: dict[int, float]


def ways(weights: list[Tensor]) -> dict[str, list[Callable[[Tensor], Tensor]]]:
    """For each way a function for each weight."""
    packed = [floats.Packed.of(weight) for weight in weights]
    found: dict[str, list[Callable[[Tensor], Tensor]]] = {}
    found["rows"] = [partial(F.linear, weight=weight) for weight in weights]
    if onednn_multiplies(weights[0].dtype):
        blocks = [torch.ops.mkldnn._reorder_linear_weight(weight, 16) for weight in weights]
        found["oneDNN's blocks"] = [partial(_by_onednn, blocks=one) for one in blocks]
    found["ours"] = [partial(floats.product, packed=one) for one in packed]
    if weights[0].dtype == torch.bfloat16:
        for bits in (8, 4):
            found[f"ours, {bits} bits"] = [QuantizedLinear(linear(weight, None), bits) for weight in weights]
    return found


def _by_onednn(x: Tensor, blocks: Tensor) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, blocks, None, "none", (), "")
    return found


@torch.inference_mode()
def measure(shape: tuple[int, int], dtype: torch.dtype, rounds: int, bar: tqdm) -> list[Line]:
    outputs, inputs = shape
    count = max(1, round(BYTES / (outputs * inputs * dtype.itemsize)))
    weights = [torch.randn(shape).to(dtype) for _ in range(min(count, 400))]
    found = ways(weights)
    times: dict[tuple[str, int], list[float]] = {(way, tokens): [] for way in found for tokens in TOKENS}
    for turn in range(rounds + 1):  # the first warms up
        order = list(times)
        random.Random(turn).shuffle(order)  # what went through before leaves the caches otherwise
        for way, tokens in order:
            some = found[way] if tokens <= 64 else found[way][: max(1, len(weights) // 8)]
            x = torch.randn(tokens, inputs).to(dtype)
            start = perf_counter()
            for one in some:
                one(x)
            if turn:
                times[way, tokens].append(1e6 * (perf_counter() - start) / len(some))
        bar.update()
    name = dtype_name(dtype)
    return [
        Line(outputs, inputs, name, way, {at: sorted(times[way, at])[rounds // 4] for at in TOKENS}) for way in found
    ]


def run(options: ProductsOptions) -> None:
    dtypes = [dtype for dtype in (torch.float32, torch.bfloat16) if floats.supports(dtype) and onednn_multiplies(dtype)]
    if not dtypes:
        raise ConfigError("this CPU or this build of torch lacks what is compared: AVX2, GNU's OpenMP and oneDNN")
    lines: list[Line] = []
    with tqdm(total=len(SHAPES) * len(dtypes) * (options.rounds + 1)) as bar:
        for dtype in dtypes:
            for shape in SHAPES:
                lines += measure(shape, dtype, options.rounds, bar)
    cells = [
        [f"{one.outputs} x {one.inputs}", one.dtype, one.way, *map(show, one.microseconds.values())] for one in lines
    ]
    note = (
        "Microseconds of a product of a weight (outputs x inputs) with so many tokens, lower quartile of "
        f"{options.rounds} rounds, as other work on the machine only ever adds. *Rows*: torch's own, of a weight as "
        "checkpoints have it. *8 bits*, *4 bits*: of weights as `quantize` keeps them."
    )
    record = {"rounds": options.rounds, "rows": [asdict(one) for one in lines]}
    table = markdown(["weight", "dtype", "way", *map(str, TOKENS)], cells)
    parts = ["### Products", table, note]
    print(commands.write_results(Path(options.output), "products", record, *parts))


main = commands.program(run, ProductsOptions)


if __name__ == "__main__":
    main()
