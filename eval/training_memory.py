"""Peak memory of a training step at widths that do not fit here: counted on tensors without storage.

    python -m eval.training_memory --output eval/results/training-memory

A step's forward and backward pass runs as in training (bfloat16 autocast, float32 weights, one text in which every
position is a root), on torch's fake tensors: every operation and every release of memory happens, and no number is
computed. *At once* is with logits and attention scores of all positions at once; *in parts* as training does it;
*checkpointed* with `training.gradient_checkpointing` besides. At an eighth of every size the same is counted on real
tensors, beside what the fake ones say of it.

What depends on numbers is taken as large as it can be: all steps are supervised, and every query sees the whole memory.
Kernels' own work space and fragmentation are not counted, nor are the target's forward pass and blocks.
"""

import json
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

from eval import commands
from shape.evaluation.journal import refuse_other
from shape.evaluation.markdown import markdown
from shape.files import human_bytes
from shape.networks import layers
from shape.networks.config import ShapeConfig
from shape.networks.decoder import layers_like
from shape.networks.registry import PREDICTORS
from shape.networks.teacher_forcing import Texts
from shape.target.model import Target
from shape.training import chunks
from shape.training.batches import Batch
from shape.training.module import ShapeModule
from shape.training.options import Losses, TrainingOptions

HEAD = 128
SCALE = 8  # by which the sizes that are computed with real numbers are smaller


@dataclass(frozen=True)
class Sizes:
    """Of a target and its training text; the draft vocabulary is a quarter of the target's."""

    width: int
    tokens: int
    vocab_size: int = 128_256
    feed_forward: int = 14_336

    def smaller(self) -> "Sizes":
        return Sizes(self.width // SCALE, self.tokens // SCALE, self.vocab_size // SCALE, self.feed_forward // SCALE)


NETWORKS: dict[str, dict[str, Any]] = {
    "EAGLE-3, 7 steps": {"kind": "eagle", "own_heads": True, "feature_layers": [2, 16, 29], "num_steps": 7},
    "DFlash, 5 layers, blocks of 8": {"kind": "block", "num_layers": 5, "feature_layers": [2, 16, 29], "num_steps": 8},
    "SHAPE, 8 steps": {"window": 8, "num_steps": 8, "step_mode": "parallel", "markov_rank": 64},
    "SHAPE, recursive with attention": {
        "window": 8, "num_steps": 8, "step_mode": "recursive", "token_conditioning": "path", "attention": True,
    },
}  # fmt: skip


class Live(TorchDispatchMode):
    """Bytes of all tensors that are alive, and the most there were.

    Args:
        steps: unrolled, which share the states of the text.
    """

    def __init__(self, steps: int, fake: bool) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.steps, self.fake = steps, fake
        self._seen = weakref.WeakSet[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self._largest(func, args) if self.fake else None
        found = func(*args, **(kwargs or {})) if found is None else found
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        return found

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size

    def _largest(self, func: Any, args: Any) -> Any:
        """What operations whose result's size depends on numbers could give at most."""
        aten = torch.ops.aten
        if func is aten.nonzero.default:
            return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        if func is aten._unique2.default:
            distinct = args[0].numel() // self.steps + self.steps
            return args[0].new_empty(distinct), torch.empty_like(args[0]), args[0].new_empty(0)
        return 10**9 if func is aten._local_scalar_dense.default else None


def peak(
    network: dict[str, Any], sizes: Sizes, *, bounds: bool, checkpointing: bool, fake: bool, scale: int = 1
) -> int:
    """Bytes of a step beside weights, their gradients and what it is given.

    Args:
        bounds: those of training, smaller by the square of the scale; else none.
    """
    steps = network["num_steps"]
    chunk, scores = (size // scale**2 if bounds else 2**60 for size in (chunks.CHUNK_BYTES, layers.SCORES_BYTES))
    bounded = patch.object(chunks, "CHUNK_BYTES", chunk), patch.object(layers, "SCORES_BYTES", scores)
    with bounded[0], bounded[1], FakeTensorMode() if fake else nullcontext():
        module, batch = made(network, sizes, checkpointing)
        with Live(steps, fake) as live:
            with torch.autocast("cpu", torch.bfloat16):
                loss = module.training_step(batch, 0)
            loss.backward()
        learned = sum(weight.numel() * 4 for weight in module.predictor.parameters() if weight.requires_grad)
    return live.peak - learned


def target_config(sizes: Sizes) -> LlamaConfig:
    heads = max(sizes.width // HEAD, 1)
    return LlamaConfig(
        hidden_size=sizes.width, intermediate_size=sizes.feed_forward, vocab_size=sizes.vocab_size,
        num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=max(heads // 4, 1),
        max_position_embeddings=sizes.tokens + 1,
    )  # fmt: skip


def config_of(network: dict[str, Any], sizes: Sizes) -> ShapeConfig:
    """Of a network for a target of such sizes."""
    own: dict[str, Any] = {"intermediate_size": sizes.width}
    if network.get("kind") in ("eagle", "block"):
        own = {"transformer_layer_config": layers_like(target_config(sizes))}
    own |= {"mask_token_id": 0} if network.get("kind") == "block" else {}
    own |= {"hidden_size": sizes.width, "vocab_size": sizes.vocab_size, "draft_vocab_size": sizes.vocab_size // 4}
    return ShapeConfig(**own, **network)


def made(network: dict[str, Any], sizes: Sizes, checkpointing: bool) -> tuple[ShapeModule, Batch]:
    """A module and its batch: one text in which every position is a root and all of its steps are supervised."""
    model = AutoModelForCausalLM.from_config(target_config(sizes), dtype=torch.bfloat16)
    target, config = Target(model.requires_grad_(False), name="random"), config_of(network, sizes)
    predictor = PREDICTORS[config.kind](config)
    predictor.draft_vocabulary = torch.arange(config.draft_size)
    if getattr(predictor, "mask_embedding", None) is not None:
        predictor.mask_embedding = torch.zeros(sizes.width)  # type: ignore[assignment]
    losses = Losses(smooth_l1=0.5 if config.kind == "shape" else 0.0)
    options = TrainingOptions(steps=1, gradient_checkpointing=checkpointing)
    with patch("shape.training.module.MeanMetric", nn.Identity):  # which copies tensors as fake ones cannot be
        module = ShapeModule(predictor, target, losses, options, log_every=10**9)
    module.log = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    states = len(predictor.config.target_layers)
    texts = Texts(
        torch.randn(1, sizes.tokens, states * sizes.width, dtype=torch.bfloat16),
        torch.zeros(1, sizes.tokens, dtype=torch.int64),
        torch.ones(1, sizes.tokens, dtype=torch.bool),
        torch.arange(1, sizes.tokens)[None],
    )
    followers = torch.full((sizes.tokens - 1,), network["num_steps"])
    return module, Batch(0, 0, 1, torch.zeros(1, dtype=torch.int64), followers, texts)


WAYS = {
    "at once": {"bounds": False, "checkpointing": False},
    "in parts": {"bounds": True, "checkpointing": False},
    "checkpointed": {"bounds": True, "checkpointing": True},
}


def learned(network: dict[str, Any], sizes: Sizes) -> int:
    """Parameters that are trained."""
    with FakeTensorMode():
        module, _ = made(network, sizes, False)
        return sum(weight.numel() for weight in module.predictor.parameters() if weight.requires_grad)


@dataclass
class MemoryOptions:
    """What to count.

    Args:
        output: folder of memory.json and memory.md; what is in there is not counted again.
        networks: by name; default: all.
        widths: of targets, in whole heads of 128.
        tokens: of the text.
    """

    output: str = "memory-results"
    networks: list[str] = field(default_factory=lambda: list(NETWORKS))
    widths: list[int] = field(default_factory=lambda: [4096, 2048])
    tokens: int = 8192


def counted(name: str, sizes: Sizes, small_too: bool) -> dict[str, Any]:
    """One network's peaks by way, in bytes, and at an eighth of every size counted and measured."""
    network, small = NETWORKS[name], sizes.smaller()
    found = {way: peak(network, sizes, fake=True, **how) for way, how in WAYS.items()}
    said, measured = (
        {way: peak(network, small, fake=fake, scale=SCALE, **how) for way, how in WAYS.items() if small_too}
        for fake in (True, False)
    )
    fixed = {"network": name, "fixed": 16 * learned(network, sizes), **asdict(sizes)}
    return {**fixed, "counted": found, "small_counted": said, "small_measured": measured}


def run(options: MemoryOptions) -> None:
    path = Path(options.output, "memory.json")
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    for row in rows:
        refuse_other(path, row, {"tokens": options.tokens})
    for width in options.widths:
        for name in options.networks:
            if any((row["width"], row["tokens"], row["network"]) == (width, options.tokens, name) for row in rows):
                continue
            sizes = Sizes(width, options.tokens, feed_forward=width * 7 // 2)
            rows.append(counted(name, sizes, small_too=width == max(options.widths)))
            write(options, rows)
    print(write(options, rows))


def write(options: MemoryOptions, rows: Sequence[dict[str, Any]]) -> str:
    large = [
        [f"{row['width']:,}", row["network"], human_bytes(row["fixed"]), *map(human_bytes, row["counted"].values())]
        for row in rows
    ]
    small_rows = [
        [
            f"{row['width'] // SCALE:,}",
            row["network"],
            *(f"{human_bytes(row['small_measured'][way])} ({human_bytes(row['small_counted'][way])})" for way in WAYS),
        ]
        for row in rows
        if row["small_counted"]
    ]
    parts = [
        "# Memory of a training step",
        f"A text of {options.tokens:,} tokens, each of which is a root; target of 128,256 tokens, of which a quarter "
        "is drafted. Counted on tensors without storage; the first column is float32 weights, gradients and AdamW's "
        "means.",
        markdown(["width", "network", "weights and optimiser", *WAYS], large),
        f"## At an eighth of every size\n\nTokens, width, vocabulary and bounds (by its square) are smaller by "
        f"{SCALE}. Measured as bytes of live tensors while it was computed on a CPU; in brackets what the same count "
        "without storage says.",
        markdown(["width", "network", *WAYS], small_rows),
    ]
    return commands.write_results(Path(options.output), "memory", {"rows": rows}, *parts)


main = commands.program(run, MemoryOptions)


if __name__ == "__main__":
    main()
