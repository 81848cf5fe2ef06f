"""What a drafter is worth on a target that was fine-tuned since, and after a minute of `shape train --init`.

    python -m eval.warm_start --output eval/results/warm-start

The shipped target is fine-tuned on a part of the training conversations with all answers in lower case: another style,
in other tokens. The shipped predictor then goes on learning from answers of the fine-tuned target (`--init`), and one
of the same configuration starts from nothing, for the same time each; both, and the shipped one as it is, draft for the
fine-tuned target on prompts of the bench split. Writes `warm-start.json` and `warm-start.md`; two idle cores need about
eight minutes.
"""

import json
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval import commands
from shape import bundled
from shape.data.conversations import Conversation, evenly
from shape.data.encoding import encode_all
from shape.data.reading import load_conversations
from shape.drafters import TrainedDrafter
from shape.evaluation.journal import JOURNAL, Journal
from shape.evaluation.markdown import markdown
from shape.evaluation.prompts import chosen_prompts
from shape.evaluation.results import SHORT, SpeedResults
from shape.evaluation.speed import SpeedSetting, measure
from shape.generation.loading import load_predictor
from shape.target.model import Target
from shape.training.parsing import parse
from shape.training.run import train

_BASE, _PREDICTOR = bundled.TARGET, bundled.PREDICTOR
_LONGEST, _BATCH, _RATE = 192, 8, 3e-4  # of the fine-tuning


@dataclass
class WarmStartOptions:
    """What to run.

    Args:
        output: folder for warm-start.json and warm-start.md.
        work: folder for the fine-tuned target, its answers and what is trained; what is there is not made again.
        tuning_steps: of the target, on batches of 8 conversations.
        conversations: whose prompts the fine-tuned target answers, to learn from.
        minutes: of training, each.
        prompts: of the bench split, to measure on.
    """

    output: Path = Path("warm-start-results")
    work: Path = Path("warm-start")
    tuning_steps: int = 100
    conversations: int = 600
    minutes: float = 1.0
    prompts: int = 24


def in_lower_case(conversation: Conversation) -> Conversation:
    """The conversation with what the assistant says in lower case."""
    messages = tuple(
        replace(each, content=each.content.lower()) if each.role == "assistant" else each
        for each in conversation.messages
    )
    return replace(conversation, messages=messages)


def fine_tune(folder: Path, steps: int) -> None:
    """Save the shipped target after so many steps on answers in lower case."""
    source = bundled.resolve(_BASE)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source).float(), AutoTokenizer.from_pretrained(source)
    given = evenly(load_conversations(bundled.path("data", "train.jsonl.gz")), steps * _BATCH)
    texts = encode_all(map(in_lower_case, given), tokenizer, _LONGEST).examples
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.0)
    for step in range(steps):
        some = texts[step % (len(texts) // _BATCH) :: len(texts) // _BATCH][:_BATCH]
        ids = torch.nn.utils.rnn.pad_sequence([text.input_ids for text in some], batch_first=True)
        learned = torch.nn.utils.rnn.pad_sequence([text.loss_mask for text in some], batch_first=True)
        logits = model(ids).logits[:, :-1]  # causal, so that padding behind a text changes nothing in it
        loss = cross_entropy(logits[learned[:, 1:]], ids[:, 1:][learned[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"fine-tuning: step {step}, loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def learn(options: WarmStartOptions, target: Path, name: str, *more: str) -> Path:
    """A predictor trained for the fine-tuned target by `shape train`, as a user would."""
    output = options.work / name
    if not (output / "config.json").is_file():
        config, data = bundled.path("configs", "quickstart.yaml"), bundled.path("data", "train.jsonl.gz")
        given = {
            "config": config, "target": target, "data": data, "limit": options.conversations,
            "features": options.work / "features", "output": output, "regeneration.max_new_tokens": 128,
            "training.max_minutes": options.minutes, "measurement.limit": 0, "logger": "none",
        }  # fmt: skip
        train(parse([*(f"--{option}={value}" for option, value in given.items()), *more]))
    return output


def drafter(source: str | Path) -> TrainedDrafter:
    """The predictor for any target of its sizes: only the one that it was trained for has its identity."""
    network = deepcopy(load_predictor(source))
    network.config.target_identity = None
    return TrainedDrafter(network)


def compared(target: Target, drafters: dict[str, TrainedDrafter], count: int) -> SpeedResults:
    prompts, _ = chosen_prompts(None, count)
    setting = SpeedSetting(max_new_tokens=64, fall_back=False)
    return measure(target, {"autoregressive": None, **drafters}, prompts, setting)


def run(options: WarmStartOptions) -> None:
    options.work.mkdir(parents=True, exist_ok=True)
    # What is in the folder already is of the same.
    Journal(
        options.work / JOURNAL, {name: getattr(options, name) for name in ("minutes", "conversations", "tuning_steps")}
    )
    tuned, base = options.work / "target", bundled.resolve(_BASE)
    if not (tuned / "config.json").is_file():
        fine_tune(tuned, options.tuning_steps)
    warm = learn(options, tuned, "warm", f"--init={bundled.resolve(_PREDICTOR)}")
    fresh = learn(options, tuned, "fresh")
    before = compared(Target.load(base), {"as it is": drafter(_PREDICTOR)}, options.prompts)
    names: dict[str, str | Path] = {"as it is": _PREDICTOR, "--init": warm, "from nothing": fresh}
    after = compared(Target.load(tuned), {name: drafter(source) for name, source in names.items()}, options.prompts)
    columns = ["target", "predictor", *SHORT]
    lines = [["the shipped one", *before.lines(SHORT)[-1]], *(["fine-tuned", *line] for line in after.lines(SHORT)[1:])]
    found = {"shipped": json.loads(before.to_json()), "fine-tuned": json.loads(after.to_json())}
    record = {"minutes": options.minutes, **found}
    about = (
        f"`python -m eval.warm_start`: the shipped target after {options.tuning_steps} steps on answers in lower case; "
        f"predictors trained for {options.minutes:g} minute(s) each on its answers to {options.conversations} "
        f"conversations. Prompts of the bench split, greedy. {after.about}"
    )
    print(
        commands.write_results(
            options.output,
            "warm-start",
            record,
            "# Warm start",
            about,
            markdown(columns, lines),
            environment=after.environment,
        )
    )


main = commands.program(run, WarmStartOptions)


if __name__ == "__main__":
    main()
