"""All that is measured on a GPU, in calls of at most eight minutes each.

    python -m eval.gpu --output eval/results/gpu --work WORK --data '[sgd_train.jsonl.gz, tm4.jsonl.gz]'
    python -m eval.gpu --tiny true --output /some/folder        # seconds, on a CPU, to see that it runs

Call it again until it says that it is finished: each call goes on where the last one ended. Run it in the repository,
or with that on PYTHONPATH. First, how near decoding comes to what the device can do:

- *read bandwidth*: a sum over, and a copy of, far more bytes than any cache holds; the better of the two;
- autoregressive decoding against its bound, weight bytes read per token / read bandwidth, for a randomly initialised
  bfloat16 model in the shape of Llama-3.1-8B and for a small target that exists (default: the bundled one);
- t(n), a bare captured forward over n tokens per row with its logits, and what a step adds to it, for several batches;
- *efficiency*: (t(n) + the drafter's bare forwards) / time of a step by the wall clock; without drafts t(1) / step;
- speed-up over our own autoregressive decoding of the same batch, for an oracle that drafts the truth with every fifth
  token corrupted at no cost (*simulated*: a randomly initialised target has no drafter), and for the trained predictor;
- transformers' generate at batch 1, with its dynamic cache, and with a static one and compilation;
- whether compiled steps, captured steps and the loop that asks the host give the same tokens (float32, small target).

At batch 1 steps and bare target forwards go through torch.compile before they are captured; elsewhere not, since each
shape would cost most of a minute. The drafter's bare forwards are captured only, so that the efficiency of a compiled
step with the predictor is an upper estimate. Parts that fail are named, and tried again by the next call.

Then, with `--work`, SHAPE and its baselines for a target of 60M parameters, which is trained first: on the given
dialogues and on those of our own generator (on the latter alone without `--data`). It answers 16,000 prompts, all
variants of `configs/ablations/baselines.yaml` are trained on its answers, a minute each, and measured on prompts that
neither has seen. The table lies in `baselines` of the output folder. Each step is a command of the repository.
(Written, and tried with tiny sizes on a CPU; not yet run on a GPU.)
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from eval import commands
from eval.gpu_steps import equality, measure, read_bandwidth, transformers_ms, weight_bytes
from eval.llamas import Widths, random_llama
from shape import bundled
from shape.data.conversations import evenly
from shape.data.reading import load_prompts
from shape.drafters import TrainedDrafter
from shape.errors import ConfigError
from shape.evaluation.environment import Environment
from shape.evaluation.journal import JOURNAL, Journal
from shape.evaluation.markdown import markdown, show
from shape.evaluation.results import AUTOREGRESSIVE
from shape.generation.decoder import ShapeDecoder
from shape.target.chat import prompt_ids
from shape.target.model import Target

BATCHES = (1, 2, 4, 8, 16, 24)
LLAMA_8B = Widths(4096, 14336, 32, 8, 32, vocab_size=128256, max_position_embeddings=8192)
TINY = Widths(32, 48, 4, 2, 2, vocab_size=97, max_position_embeddings=8192)
REPOSITORY = Path(__file__).resolve().parent.parent
TARGET: dict[str, Any] = {
    "hidden_size": 768, "layers": 8, "heads": 12, "kv_heads": 4, "head_dim": 64, "intermediate_size": 2048,
    "vocabulary": 8192, "batch": 64, "portion": 64, "steps": 1500,
}  # fmt: skip
CONVERSATIONS = 16_000
VARIANTS: dict[str, Any] = {
    "training.max_minutes": 1,
    "training.batch_size": 4096,
    "trainer.accumulate_grad_batches": 1,
    "predictor.intermediate_size": 1024,
    "predictor.draft_vocab_size": 4096,
    "regeneration.batch_size": 256,
}


@dataclass
class GpuOptions:
    """What to measure.

    Args:
        output: folder for gpu.json and gpu.md, and for the table of the baselines.
        work: folder for what the baselines' trainings make on the way; without one they are left out.
        data: ShareGPT files to train the baselines' target on.
        ablate: more options of eval.ablate for the baselines, for example '["--seeds=[0]"]'.
        target: the small target: folder, hub id or bundled name; default: the bundled one.
        predictor: its trained predictor; default: the shipped one of the bundled target.
        minutes: a call ends after so many.
        tokens: new ones per answer.
        compile: whether steps go through torch.compile at batch 1.
        tiny: a tiny random model, two batches, few tokens, on any device.
    """

    output: str = "gpu"
    work: str | None = None
    data: list[str] = field(default_factory=list)
    ablate: list[str] = field(default_factory=list)
    target: str | None = None
    predictor: str | None = None
    minutes: float = 8.0
    tokens: int = 128
    compile: bool = True
    tiny: bool = False


Found = dict[str, list[Any]]  # kind of figures -> lines


class Record:
    """What is known so far; every part is kept as soon as it is measured, and results are written anew.

    Args:
        settings: what figures depend on; those of an earlier call with others are refused.
        minutes: of this call.

    Attributes:
        left_out: parts that this call had no time for, or that failed, with the reason.
    """

    def __init__(self, folder: Path, environment: Environment, settings: dict[str, Any], minutes: float) -> None:
        self.folder, self.environment, self.left_out = folder, environment, list[str]()
        self.journal = Journal(folder / JOURNAL, settings | environment.machine())
        self.found: dict[str, Found] = {line["part"]: line["found"] for line in self.journal.records}
        self.deadline = monotonic() + 60 * minutes

    def part(self, name: str, seconds: float, measure: Callable[[], Found]) -> None:
        """Measures a part that takes about so long, unless that was done; what it raises is recorded, not passed on."""
        if name in self.found:
            return
        print(name, flush=True)
        if self.deadline - monotonic() < seconds:
            self.left_out.append(f"{name}: no time left")
            return
        try:
            self.found[name] = measure()
            self.journal.append({"part": name, "found": self.found[name]})
        except Exception as error:  # one part that fails must not cost the others
            self.left_out.append(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            print(f"       {self.left_out[-1]}", flush=True)
        self.write()

    def lines(self, kind: str) -> list[Any]:
        return [line for found in self.found.values() for line in found.get(kind, [])]

    @property
    def bandwidth(self) -> float:
        """Bytes per second; 0 where it is not known."""
        return max(self.lines("bandwidth"), default=0.0)

    def write(self) -> str:
        """gpu.json and gpu.md, whose text is returned."""
        kinds = ("bandwidth", "bounds", "cases", "baselines", "equal")
        values = {"environment": asdict(self.environment), **{kind: self.lines(kind) for kind in kinds}}
        return commands.write_results(self.folder, "gpu", values | {"left_out": self.left_out}, *self._paragraphs())

    def _paragraphs(self) -> list[str]:
        bounds = [
            [one["target"], show(one["weight_gb"]), show(one["bound_ms"], ".3f"), show(one["plain_ms"], ".3f"),
             show(one["plain_ms"] / one["bound_ms"], unit="x")]
            for one in self.lines("bounds")
        ]  # fmt: skip
        cases = [
            [one["target"], str(one["batch"]), one["method"], "yes" if one["compiled"] else "no", str(one["nodes"]),
             show(one["forward_ms"], ".3f"), show(one["draft_ms"], ".3f"), show(one["step_ms"], ".3f"),
             show(one["step_ms"] - one["forward_ms"] - one["draft_ms"], ".3f"), show(one["device_ms"], ".3f"),
             show(one["efficiency"]), show(one["acceptance_length"]), show(one["tokens_per_second"], ".0f"),
             show(one["speed_up"], unit="x")]
            for one in self.lines("cases")
        ]  # fmt: skip
        others = [[one["target"], one["method"], show(one["token_ms"], ".3f")] for one in self.lines("baselines")]
        same = [[one["method"], f"{one['equal']} / {one['answers']}"] for one in self.lines("equal")]
        return [
            "### Decoding on a GPU: steps of fixed shapes",
            f"Read bandwidth, measured: {self.bandwidth / 1e9:.0f} GB/s.",
            "Autoregressive decoding, batch 1, against the bound of reading all weights once:",
            markdown(["target", "weights, GB", "bound, ms", "ms per token", "over the bound"], bounds),
            "Steps; `oracle (simulated)` drafts the truth with every fifth token corrupted, at no cost:",
            markdown(
                ["target", "batch", "method", "compiled", "n", "t(n) ms", "drafter ms", "step ms", "overhead ms",
                 "step on device ms", "efficiency", "acceptance length", "tokens/s", "speed-up"],
                cases,
            ),
            "transformers' generate, batch 1:",
            markdown(["target", "method", "ms per token"], others),
            "Answers token for token equal to the eager loop's (small target, float32, greedy):",
            markdown(["steps", "equal"], same),
            "Left out: " + ("; ".join(self.left_out) or "nothing") + ".",
            self.environment.line(),
        ]  # fmt: skip


def loaded(options: GpuOptions, dtype: str, device: torch.device) -> tuple[Target, TrainedDrafter | None]:
    """The small target and its predictor, which is left out for a target that it was not trained for."""
    name = options.target or "quickstart-target"
    predictor = options.predictor or (None if options.target else "quickstart-shape")
    if predictor is None:
        return Target.load(name, dtype=dtype, device_map=device), None
    decoder = ShapeDecoder.from_pretrained(predictor, target=name, dtype=dtype, device_map=device)
    assert isinstance(decoder.drafter, TrainedDrafter)
    return decoder.target, decoder.drafter


def run(options: GpuOptions) -> None:
    """Everything that is missing and that there is time for; says whether that was all."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        raise ConfigError("no CUDA device is there; --tiny true shows on a CPU that the program runs")
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    asked = ("target", "predictor", "tokens", "compile", "tiny")
    settings = {name: value for name, value in asdict(options).items() if name in asked}
    record = Record(Path(options.output), Environment.capture(device), settings, options.minutes)
    decoding(options, record, device)
    print(record.write())
    finished = not any(reason.endswith(": no time left") for reason in record.left_out)
    if finished and options.work is not None:
        finished = baselines(options, record.deadline)
    print("finished" if finished else "the time is over, and it is not finished: call it again", flush=True)


def decoding(options: GpuOptions, record: Record, device: torch.device) -> None:
    """The parts about decoding, each unless it is known. Targets are loaded when a part needs them."""
    batches, tokens = ((1, 2), 12) if options.tiny else (BATCHES, options.tokens)
    compiles = options.compile and not options.tiny

    @cache
    def large() -> tuple[Target, TrainedDrafter | None]:
        return random_llama(TINY if options.tiny else LLAMA_8B, torch.bfloat16, device), None

    @cache
    def small() -> tuple[Target, TrainedDrafter | None]:
        return loaded(options, "bfloat16", device)

    def random_prompts() -> list[list[int]]:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(3, large()[0].vocab_size, (max(batches), 64), generator=generator).tolist()

    def real_prompts() -> list[list[int]]:
        target = small()[0]
        chosen = evenly(load_prompts(bundled.path("data", "bench.jsonl")), max(batches))
        return [prompt_ids(prompt.messages, target.tokenizer, prompt.template) for prompt in chosen]

    def cases(label: str, load: Callable, prompts: Callable[[], list[list[int]]], batch: int, compiled: bool) -> Found:
        target, predictor = load()
        found = list(measure(target, predictor, prompts()[:batch], tokens, compiled))
        (baseline,) = (one for one in found if one.method == AUTOREGRESSIVE)
        size = weight_bytes(target)
        bound = {"target": label, "weight_gb": size / 1e9, "bound_ms": 1e3 * size / record.bandwidth}
        bounds = [{**bound, "plain_ms": baseline.step_ms}] if batch == 1 else []
        return {"cases": [one.to_dict() | {"target": label} for one in found], "bounds": bounds}

    def outside(label: str, load: Callable, prompts: Callable[[], list[list[int]]], how: str, **more: Any) -> Found:
        token_ms = transformers_ms(load()[0], prompts()[0], tokens, **more)
        return {"baselines": [{"target": label, "method": how, "token_ms": token_ms}]}

    def equal() -> Found:
        if options.tiny:
            return {"equal": equality(random_llama(TINY, torch.float32, device), None, random_prompts(), tokens, False)}
        return {"equal": equality(*loaded(options, "float32", device), real_prompts()[:8], 64, compiles)}

    size = 2**24 if options.tiny else 2**32
    record.part("read bandwidth", 0, lambda: {"bandwidth": [read_bandwidth(device, size)]})
    # The large one first: it is what the bound is about.
    label = "random, tiny" if options.tiny else "random, Llama-3.1-8B-shaped"
    name = Path(options.target or "quickstart-target").name
    measured = [(label, large, random_prompts, 0.1 if options.tiny else 1.0)]
    measured += [] if options.tiny else [(name, small, real_prompts, 0.4)]
    for what, load, prompts, weight in measured:
        for batch in batches:
            compiled = compiles and batch == 1
            seconds = weight * (180 if compiled else 20)
            record.part(f"{what}, batch {batch}", seconds, partial(cases, what, load, prompts, batch, compiled))
        record.part(f"{what}, transformers", weight * 20, partial(outside, what, load, prompts, "dynamic cache"))
    record.part("equality with eager steps", 0 if options.tiny else 60, equal)
    if compiles:
        static = partial(outside, label, large, random_prompts, "static cache, compiled", cache_implementation="static")
        record.part(f"{label}, transformers, static cache", 90, static)


def launch(deadline: float, work: Path, *command: str | Path) -> bool:
    """A command in the work folder, interrupted when the time is over; each of them goes on where it stopped.

    Returns:
        Whether it came to its end.
    """
    print("$ python", *command, flush=True)
    place = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, *map(str, command)], cwd=work, env=place, start_new_session=True)
    try:
        status = process.wait(max(deadline - monotonic(), 0))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        return False
    if status:
        raise ConfigError(f"that command ended with status {status}; see what it said above")
    return True


def conversations(count: int) -> list[dict[str, Any]]:
    """What our generator taught the target, of which the drafters learn the target's own answers."""
    spec = importlib.util.spec_from_file_location("quickstart_target", REPOSITORY / "train/quickstart_target.py")
    assert spec and spec.loader
    recipe = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = recipe  # dataclasses look their module up by name
    spec.loader.exec_module(recipe)
    train, _ = recipe.generated_rows(count)
    return train


def baselines(options: GpuOptions, deadline: float) -> bool:
    """The baselines' table, as far as there is time; whether it is finished."""
    work = Path(str(options.work)).resolve()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "target-is-done").exists():
        sizes = [f"--{name}={value}" for name, value in TARGET.items()]
        data = ["--data", *(str(Path(file).resolve()) for file in options.data)]
        recipe = REPOSITORY / "train/quickstart_target.py"
        if not launch(deadline, work, recipe, "--output=target", "--resume", *sizes, *data):
            return False
        (work / "target-is-done").touch()
    if not (work / "train.jsonl").exists():
        part = work / "train.part"
        part.write_text("".join(json.dumps(row) + "\n" for row in conversations(CONVERSATIONS)), encoding="utf-8")
        part.replace(work / "train.jsonl")
    changes = ",".join(f"{name}={value}" for name, value in VARIANTS.items())
    ended = launch(
        deadline, work, "-m", "eval.ablate", "baselines", "--target=target", "--data=train.jsonl",
        f"--measure.prompts={REPOSITORY / 'data/bench.jsonl'}", "--output=baselines", f"--override=[{changes}]",
        "--title=SHAPE and its baselines for a larger target, on a GPU", *options.ablate,
    )  # fmt: skip
    if ended:
        table = Path(options.output) / "baselines"
        table.mkdir(parents=True, exist_ok=True)
        for name in ("ablation.json", "ablation.md"):
            shutil.copy(work / "baselines" / name, table)
    return ended


def main(arguments: Sequence[str] | None = None) -> None:
    commands.run(run, GpuOptions, arguments)


if __name__ == "__main__":
    main()
