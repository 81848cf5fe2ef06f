"""What a draft of the default predictor costs beside a step of the target, by its width and what it drafts from.

    python eval/default_sizes.py --output eval/results/sizes

On random Llamas with the sizes of models that people have, and on the bundled target: costs do not depend on what was
learned. Each line is a whole draft (8 deep, 12 nodes) and a plain step in turn, the lower quartile of many, in time of
one thread's own, so that other work on the machine counts little; beside it is the share by weights read, which is
what `shape.training.forecast` says where nothing is measured, and which of the lines the rule
(`shape.training.defaults`) chooses.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from time import thread_time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from shape.drafters import PREDICTORS, TrainedDrafter
from shape.evaluation.environment import Environment
from shape.evaluation.markdown import markdown
from shape.generation.decoder import ShapeDecoder
from shape.generation.timing import draft_cost
from shape.target.model import Target
from shape.target.size import Size, size_of
from shape.training.defaults import network_config, resolve
from shape.training.forecast import network_size, weights_read
from shape.training.options import TrainOptions

# hidden size, inner width, heads, heads of keys, blocks, vocabulary: SmolLM-135M, Qwen2.5-0.5B with Llama's layers
SHAPES = {"135M": (576, 1536, 9, 3, 30, 49_152), "0.5B": (896, 4864, 14, 2, 24, 151_936)}
WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")


def load(name: str) -> Target:
    if name not in SHAPES:
        return Target.load(name, dtype="bfloat16")
    torch.manual_seed(0)
    *widths, vocabulary = SHAPES[name]
    config = LlamaConfig(
        **dict(zip(WIDTHS, widths, strict=True)), vocab_size=vocabulary, tie_word_embeddings=True,
        max_position_embeddings=2048,
    )  # fmt: skip
    return Target.load(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), prepacked=True)


def candidates(size: Size) -> list[TrainOptions]:
    """Around what the rule chooses, which comes first: narrower and wider, and other draft vocabularies."""
    chosen = resolve(TrainOptions(), size, None)
    found = [chosen]
    for width in (size.hidden_size // 2, size.hidden_size, 2 * size.hidden_size):
        found.append(replace(chosen, predictor=replace(chosen.predictor, intermediate_size=width)))
    for drafted in (2048, None):
        found.append(replace(chosen, predictor=replace(chosen.predictor, draft_vocab_size=drafted)))
    return [each for number, each in enumerate(found) if each not in found[:number]]


def measure(name: str, repeats: int) -> list[dict[str, object]]:
    target = load(name)
    size, rows = size_of(target.model), []
    for options in candidates(size):
        config = network_config(options, target)
        assert config is not None
        network = PREDICTORS[config.kind](config)
        if config.draft_vocab_size is not None:
            network.draft_vocabulary = torch.arange(config.draft_vocab_size)
        drafter = TrainedDrafter(network.to(target.dtype).eval(), options.tree)
        draft, plain = draft_cost(ShapeDecoder(target, drafter), repeats=repeats, clock=thread_time)
        learned = network_size(options, size)
        rows.append(
            {
                "target": name,
                "width": config.intermediate_size,
                "drafted": config.draft_size,
                "parameters": learned,
                "by_rule": not rows,
                "draft_ms": 1e3 * draft,
                "step_ms": 1e3 * plain,
                "measured": draft / plain,
                "by_weights": weights_read(options, size, learned) / size.read,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("sizes-results"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--targets", nargs="+", default=["quickstart-target", *SHAPES])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in args.targets for row in measure(name, args.repeats)]
    environment = Environment.capture(torch.device("cpu"))
    head = [
        "target",
        "width",
        "drafted from",
        "parameters",
        "draft ms",
        "step ms",
        "measured",
        "by weights",
        "the rule",
    ]
    cells = [
        [row["target"], f"{row['width']:,}", f"{row['drafted']:,}", f"{row['parameters'] / 1e6:.1f}M",
         f"{row['draft_ms']:.2f}", f"{row['step_ms']:.2f}", f"{row['measured']:.2f}", f"{row['by_weights']:.2f}",
         "chosen" if row["by_rule"] else ""]
        for row in rows
    ]  # fmt: skip
    note = (
        "A draft 8 deep of 12 nodes over a step of one token, behind 128 tokens, bfloat16, one row, one thread's own "
        f"time, lower quartile of {args.repeats}; all but the first target are random Llamas. By weights: what a draft "
        "reads over what a step reads."
    )
    args.output.mkdir(parents=True, exist_ok=True)
    record = {"repeats": args.repeats, "environment": asdict(environment), "rows": rows}
    (args.output / "sizes.json").write_text(json.dumps(record, indent=1))
    text = "\n\n".join(
        ["### What a draft of the default predictor costs", markdown(head, cells), note, environment.line()]
    )
    (args.output / "sizes.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
