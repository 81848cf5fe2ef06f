"""What drafts bring on targets with recurrent layers, which go back where a part of a draft is rejected.

    python -m eval.recurrent --output eval/results/recurrent

Random weights in the widths of models that people have, which no predictor can be trained for: an oracle drafts chains
of which each step accepts the same number of tokens, at the cost of a predictor of the default size
(``eval.peers.oracle``) and, where the family has one, of the target's own MTP layer. It, our plain loop and
transformers' own answer random prompts in turn, round after round.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoConfig

from eval import commands
from eval.commands import Spent
from eval.llamas import random_target
from eval.peers.oracle import Charged, SteadyOracle, untrained_predictor
from eval.peers.systems import draft_depth
from shape.evaluation.estimates import Estimate, over_prompts, relative_rate
from shape.evaluation.markdown import markdown
from shape.evaluation.runner import Runner, by_decoder, by_transformers, rotated
from shape.generation.decoder import ShapeDecoder
from shape.networks.config import MTP_TARGETS
from shape.target.model import Target
from shape.training.options import PredictorOptions

_TRANSFORMERS, _PLAIN = "transformers", "autoregressive"
_COMMON = {"hidden_size": 1024, "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 4096}
_OWN_LAYER = PredictorOptions(kind="mtp", num_steps=3, markov_rank=0, draft_vocab_size=None)
_OWN_LAYERS = {"MTP layer": _OWN_LAYER, "MTP layer, fewer tokens": replace(_OWN_LAYER, draft_vocab_size="auto")}
_ATTENDING = (2, 5, 8, 10, 12, 14)  # of LFM2's layers
# Model type and configuration, by whose widths these are.
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5-0.8B": (
        "qwen3_5_text",
        _COMMON | {
            "vocab_size": 248_320, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
            "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "LFM2-350M": (
        "lfm2",
        _COMMON | {
            "vocab_size": 65_536, "intermediate_size": 4608, "block_auto_adjust_ff_dim": False, "num_hidden_layers": 16,
            "num_attention_heads": 16, "num_key_value_heads": 8,
            "layer_types": ["full_attention" if layer in _ATTENDING else "conv" for layer in range(16)],
        },
    ),
}  # fmt: skip


@dataclass
class RecurrentOptions:
    """What to measure.

    Args:
        output: folder for recurrent.json and recurrent.md.
        targets: whose widths.
        lengths: acceptance lengths that are simulated.
        dtype: of the targets.
        prompts: of 100 random tokens each.
        new_tokens: of an answer.
        rounds: over all prompts.
    """

    output: str = "recurrent-results"
    targets: list[str] = field(default_factory=lambda: list(TARGETS))
    lengths: list[int] = field(default_factory=lambda: [2, 3, 4, 5])
    dtype: str = "bfloat16"
    prompts: int = 3
    new_tokens: int = 64
    rounds: int = 3


@dataclass
class Case:
    """A method on a target.

    Attributes:
        rate: tokens per second behind the prefill.
        length: tokens per forward.
        equal: share of answers that are the plain loop's.
    """

    target: str
    method: str
    rate: float
    length: float
    equal: float
    speed_up: Estimate


def measure(name: str, target: Target, options: RecurrentOptions) -> list[Case]:
    generator = torch.Generator().manual_seed(0)
    size = (options.prompts, 100)
    prompts = torch.randint(target.vocab_size, size, generator=generator).tolist()
    how: dict[str, Any] = {"max_new_tokens": options.new_tokens, "do_sample": False}
    plain = by_decoder(ShapeDecoder(target), **how)
    answers = [plain([prompt], [0]).sequences[0] for prompt in prompts]
    runners: dict[str, Runner] = {_TRANSFORMERS: by_transformers(target, **how), _PLAIN: plain}
    texts, lengths = [[*one, *own] for one, own in zip(prompts, answers, strict=True)], [100] * len(prompts)
    drafters = [("drafted", untrained_predictor(target), [(length, draft_depth(length)) for length in options.lengths])]
    if target.config.model_type in MTP_TARGETS:
        steps = _OWN_LAYER.num_steps
        within = [(length, steps) for length in options.lengths if length <= steps]
        drafters += [(own, untrained_predictor(target, chosen), within) for own, chosen in _OWN_LAYERS.items()]
    for method, predictor, chains in drafters:
        for length, depth in chains:
            charged = Charged(predictor, SteadyOracle(texts, lengths, length, depth), depth)
            runners[f"{method}, {length}"] = by_decoder(ShapeDecoder(target, charged, fall_back=False), **how)
    spent = {method: [Spent()] * len(prompts) for method in runners}
    for runner in runners.values():  # warms up
        runner([prompts[0]], [0])
    for turn in tqdm(range(options.rounds), desc=name):
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            for method in rotated(list(runners), turn + number):
                run = runners[method]([prompt], [0])
                forwards = run.timed_tokens if run.stats is None else run.stats.forwards
                same = run.sequences[0] == answer
                spent[method][number] += Spent(run.decode_seconds, run.timed_tokens, forwards, same)
    return [_case(name, method, own, spent[_PLAIN], options.rounds) for method, own in spent.items()]


def _case(name: str, method: str, spent: Sequence[Spent], plain: Sequence[Spent], rounds: int) -> Case:
    whole = Spent.total(spent)
    speed_up = over_prompts(relative_rate, spent, plain)
    equal = whole.equal / (rounds * len(spent))
    return Case(name, method, whole.tokens / whole.seconds, whole.tokens / whole.forwards, equal, speed_up)


def run(options: RecurrentOptions) -> None:
    cases: list[Case] = []
    for name in options.targets:
        kind, values = TARGETS[name]
        config = AutoConfig.for_model(kind, **values, eos_token_id=None, bos_token_id=None, pad_token_id=0)
        target = random_target(config, getattr(torch, options.dtype), prepacked=True, repeating=True)
        cases += measure(name, target, options)
    head = ["widths of", "method", "tokens/s", "against autoregressive (95 %)", "tokens per forward", "same answers"]
    cells = [
        [one.target, one.method, f"{one.rate:.1f}", one.speed_up.text("x"), f"{one.length:.2f}", f"{one.equal:.0%}"]
        for one in cases
    ]
    note = (
        f"Random weights, {options.dtype}, {options.prompts} prompts of 100 tokens, {options.new_tokens} new tokens, "
        f"batch size 1, {options.rounds} rounds in turn, without prefills; intervals are over prompts. *Drafted, n*: "
        "chains of which an oracle has n - 1 tokens accepted in each step, at the cost of a predictor of the default "
        "size; *MTP layer*: at that of such a layer of the target's widths, which drafts three tokens, from all or, "
        "*fewer tokens*, from 32,768. A step behind more than 16 tokens that have to go through again does not draft, "
        "so that tokens per forward are fewer."
    )
    record = {"rows": [asdict(one) for one in cases]}
    parts = ["### Targets with recurrent layers", markdown(head, cells), note]
    print(commands.write_results(Path(options.output), "recurrent", record, *parts))


main = commands.program(run, RecurrentOptions)


if __name__ == "__main__":
    main()
