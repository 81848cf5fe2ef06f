"""All that is measured on a GPU, in calls of at most eight minutes each.

    python -m eval.gpu --output eval/results/gpu --work WORK --data '[sgd_train.jsonl.gz, tm4.jsonl.gz]'
    python -m eval.gpu --tiny true --output /some/folder        # seconds, on a CPU, to see that it runs

Call it again until it says that it is finished: each call goes on where the last one ended. Run it in the repository,
or with that on PYTHONPATH. What is cheap comes first, so that a first call says most:

- *read bandwidth*: a sum over, and a copy of, far more bytes than any cache holds; the better of the two;
- whether torch.compile works here at all; without it compiled steps are left out, and everything else is measured;
- whether captured, and compiled and captured, steps give the tokens of the loop that asks the host (float32, small
  target);
- autoregressive decoding against its bound, weight bytes read per token / read bandwidth, for a small target that
  exists (default: the bundled one) and for randomly initialised bfloat16 models in the shapes of Llama-3.2-1B and
  Llama-3.1-8B; the goal is 1.25 of the bound for the largest;
- t(n) by kernels of ours beside the target's own layers, where it is served by these (`shape.verification.fused_gpu`);
- t(n), a bare captured forward over n tokens per row with its logits, and what a step adds to it, for batches of 1 to
  32, in eager, captured (*graphs*) and compiled steps;
- *efficiency*: (t(n) + the drafter's bare forwards) / time of a step by the wall clock; without drafts t(1) / step; the
  goal is 0.9;
- speed-up over our own autoregressive decoding of the same batch in the same kind of steps, for an oracle that drafts
  the truth with a fifth of its tokens corrupted at random, at no cost (*simulated*: a randomly initialised target has
  no drafter), and for the trained predictor;
- transformers' generate at batch 1, with its dynamic cache, and with a static one and compilation.

Compiled steps go with compiled bare forwards. The drafter's bare forwards are captured only, so that the efficiency of
a compiled step with the predictor is an upper estimate. Parts that fail are named with their reason, and tried again by
the next call.

Then, with `--work`, SHAPE and its baselines for a target of 60M parameters, which is trained first: on the given
dialogues and on those of our own generator (on the latter alone without `--data`). It answers 16,000 prompts, all
variants of `configs/ablations/baselines.yaml` are trained on its answers, a minute each, and measured on prompts that
neither has seen. The table lies in `baselines` of the output folder. Each step is a command of the repository.
(The trainings were tried with tiny sizes on a CPU alone.)
"""

import gc
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from eval import commands
from eval.commands import REPOSITORY
from eval.gpu_steps import (
    COMPILED,
    EAGER,
    GRAPHS,
    compiler,
    equality,
    forwards,
    measure,
    read_bandwidth,
    transformers_ms,
    weight_bytes,
)
from eval.llamas import Widths, random_llama
from shape.drafters import TrainedDrafter
from shape.errors import ConfigError, how_to_install
from shape.evaluation.environment import Environment
from shape.evaluation.journal import JOURNAL, Journal
from shape.evaluation.markdown import markdown, show
from shape.evaluation.prompts import chosen_prompts
from shape.evaluation.results import AUTOREGRESSIVE
from shape.files import write_whole
from shape.generation.decoder import ShapeDecoder
from shape.target.loading import first_line
from shape.target.model import Target

FORWARDS = ((1, 1, 512), (1, 7, 512), (1, 13, 512), (8, 7, 512), (1, 1, 8192), (1, 13, 8192))
BATCHES = (1, 2, 4, 8, 16, 24, 32)
LLAMA_1B = Widths(2048, 8192, 32, 8, 16, vocab_size=128256, max_position_embeddings=8192, tie_word_embeddings=True)
LLAMA_8B = Widths(4096, 14336, 32, 8, 32, vocab_size=128256, max_position_embeddings=8192)
TINY = Widths(32, 48, 4, 2, 2, vocab_size=97, max_position_embeddings=8192)
TARGET: dict[str, Any] = {
    "hidden_size": 768, "layers": 8, "heads": 12, "kv_heads": 4, "head_dim": 64, "intermediate_size": 2048,
    "vocabulary": 8192, "batch": 64, "portion": 64,
}  # fmt: skip
VARIANTS: dict[str, Any] = {
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
        target_steps: so many steps are trained of it.
        conversations: so many prompts it answers, for the drafters to learn from.
        training_minutes: of each drafter.
        ablate: more options of eval.ablate for the baselines, for example '["--seeds=[0]"]'.
        decoding: whether decoding is measured, or the baselines alone.
        target: the small target: folder, hub id or bundled name; default: the bundled one.
        predictor: its trained predictor; default: the shipped one of the bundled target.
        minutes: a call ends after so many.
        tokens: new ones per answer.
        compile: whether steps go through torch.compile too, which takes minutes.
        tiny: a tiny random model, two batches, few tokens, on any device.
    """

    output: str = "gpu"
    work: str | None = None
    data: list[str] = field(default_factory=list)
    target_steps: int = 1500
    conversations: int = 16_000
    training_minutes: float = 1.0
    decoding: bool = True
    ablate: list[str] = field(default_factory=list)
    target: str | None = None
    predictor: str | None = None
    minutes: float = 8.0
    tokens: int = 128
    compile: bool = True
    tiny: bool = False


Found = dict[str, list[Any]]  # kind of figures -> lines
Loader = Callable[[], tuple[Target, TrainedDrafter | None]]
Prompts = Callable[[], list[list[int]]]
NEEDED = ("pytorch_lightning", "datasets", "torchmetrics", "tensorboard")  # by the baselines' trainings


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
            self.left_out.append(f"{name}: {type(error).__name__}: {first_line(error)}")
            print(f"       {self.left_out[-1]}", flush=True)
        with suppress(RuntimeError):  # of a device that one part has broken, which the next call finds whole
            gc.collect()
            torch.cuda.empty_cache()
        self.write()

    def lines(self, kind: str) -> list[Any]:
        return [line for found in self.found.values() for line in found.get(kind, [])]

    @property
    def bandwidth(self) -> float:
        """Bytes per second; 0 where it is not known."""
        return max(self.lines("bandwidth"), default=0.0)

    def write(self) -> str:
        """gpu.json and gpu.md, whose text is returned."""
        kinds = ("bandwidth", "compiler", "bounds", "forwards", "cases", "baselines", "equal")
        values = {kind: self.lines(kind) for kind in kinds} | {"left_out": self.left_out}
        return commands.write_results(self.folder, "gpu", values, *self._paragraphs(), environment=self.environment)

    def _paragraphs(self) -> list[str]:
        bounds = [
            [one["target"], one["steps"], show(one["weight_gb"]), show(one["bound_ms"], ".3f"),
             show(one["plain_ms"], ".3f"), show(one["plain_ms"] / one["bound_ms"], unit="x")]
            for one in self.lines("bounds")
        ]  # fmt: skip
        cases = [
            [one["target"], str(one["batch"]), one["method"], one["steps"], str(one["nodes"]),
             show(one["forward_ms"], ".3f"), show(one["draft_ms"], ".3f"), show(one["step_ms"], ".3f"),
             show(one["step_ms"] - one["forward_ms"] - one["draft_ms"], ".3f"), show(one["device_ms"], ".3f"),
             show(one["efficiency"]), show(one["acceptance_length"]), show(one["tokens_per_second"], ".0f"),
             show(one["speed_up"], unit="x")]
            for one in self.lines("cases")
        ]  # fmt: skip
        forwards = [
            [one["target"], str(one["batch"]), str(one["nodes"]), str(one["slots"]), show(one["ours_ms"], ".3f"),
             show(one["own_ms"], ".3f"), show(one["own_ms"] / one["ours_ms"], unit="x")]
            for one in self.lines("forwards")
        ]  # fmt: skip
        others = [[one["target"], one["method"], show(one["token_ms"], ".3f")] for one in self.lines("baselines")]
        same = [[one["method"], f"{one['equal']} / {one['answers']}"] for one in self.lines("equal")]
        return [
            "### Decoding on a GPU",
            f"Read bandwidth, measured: {self.bandwidth / 1e9:.0f} GB/s.",
            "Autoregressive decoding, batch 1, against the bound of reading all weights once (goal: 1.25 of it):",
            markdown(["target", "steps", "weights, GB", "bound, ms", "ms per token", "over the bound"], bounds),
            "A captured forward over n tokens a row, by kernels of ours and by the target's own layers:",
            markdown(["target", "batch", "n", "slots", "kernels, ms", "own layers, ms", "faster"], forwards),
            "Steps (goal: efficiency 0.9), each line of one call, after another that captures; `oracle (simulated)` "
            "drafts the truth, a fifth of it corrupted, at no cost:",
            markdown(
                ["target", "batch", "method", "steps", "n", "t(n) ms", "drafter ms", "step ms", "overhead ms",
                 "step on device ms", "efficiency", "acceptance length", "tokens/s", "speed-up"],
                cases,
            ),
            "transformers' generate, batch 1:",
            markdown(["target", "method", "ms per token"], others),
            "Answers token for token equal to the eager loop's (small target, float32, greedy):",
            markdown(["steps", "equal"], same),
            "Left out: " + ("; ".join(self.left_out) or "nothing") + ".",
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
    if options.decoding:
        decoding(options, record, device)
        print(record.write())
    finished = not any(reason.endswith(": no time left") for reason in record.left_out)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if options.work is not None and missing:
        print(f"the baselines are left out: {', '.join(missing)} not installed; {how_to_install('train')}")
    elif finished and options.work is not None:
        finished = baselines(options, record.deadline)
    print("finished" if finished else "the time is over, and it is not finished: call it again", flush=True)


def decoding(options: GpuOptions, record: Record, device: torch.device) -> None:
    """The parts about decoding that are not known yet, cheap ones first. Targets are loaded when a part needs them."""
    batches, tokens = ((1, 2), 12) if options.tiny else (BATCHES, options.tokens)

    @cache
    def random(widths: Widths) -> tuple[Target, TrainedDrafter | None]:
        return random_llama(widths, torch.bfloat16, device, repeating=True), None

    @cache
    def small() -> tuple[Target, TrainedDrafter | None]:
        return loaded(options, "bfloat16", device)

    def random_prompts(vocab_size: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(3, vocab_size, (max(batches), 64), generator=generator).tolist()

    def real_prompts() -> list[list[int]]:
        target = small()[0]
        chosen, _ = chosen_prompts(None, max(batches))
        return [target.encode(prompt.opening, prompt.template)[0].tolist() for prompt in chosen]

    def cases(label: str, load: Loader, prompts: Prompts, batch: int, mode: str) -> Found:
        target, predictor = load()
        found = list(measure(target, predictor, prompts()[:batch], tokens, mode))
        (baseline,) = (one for one in found if one.method == AUTOREGRESSIVE)
        size = weight_bytes(target)
        bound = {"target": label, "steps": mode, "weight_gb": size / 1e9, "bound_ms": 1e3 * size / record.bandwidth}
        bounds = [{**bound, "plain_ms": baseline.step_ms}] if batch == 1 else []
        return {"cases": [one.to_dict() | {"target": label} for one in found], "bounds": bounds}

    def compared(label: str, load: Loader) -> Found:
        return {"forwards": [{"target": label} | one for one in forwards(load()[0], FORWARDS)]}

    def outside(label: str, load: Loader, prompts: Prompts, how: str, **more: Any) -> Found:
        token_ms = transformers_ms(load()[0], prompts()[0], tokens, **more)
        return {"baselines": [{"target": label, "method": how, "token_ms": token_ms}]}

    def equal(mode: str) -> Found:
        if options.tiny:
            target, prompts = random_llama(TINY, torch.float32, device), random_prompts(TINY.vocab_size)
            return {"equal": equality(target, None, prompts, tokens, mode)}
        return {"equal": equality(*loaded(options, "float32", device), real_prompts()[:8], 64, mode)}

    def shaped(label: str, widths: Widths, weight: float) -> tuple[str, Loader, Prompts, float]:
        return f"random, {label}", partial(random, widths), partial(random_prompts, widths.vocab_size), weight

    # With the share of the largest one's time that each takes.
    measured: list[tuple[str, Loader, Prompts, float]] = [shaped("tiny", TINY, 0.1)]
    if not options.tiny:
        measured = [(Path(options.target or "quickstart-target").name, small, real_prompts, 0.4)]
        measured += [shaped("Llama-3.2-1B-shaped", LLAMA_1B, 0.5), shaped("Llama-3.1-8B-shaped", LLAMA_8B, 1.0)]
    taking = {EAGER: 15, GRAPHS: 15, COMPILED: 100}

    record.part("read bandwidth", 0, lambda: {"bandwidth": [read_bandwidth(device, 2**24 if options.tiny else 2**32)]})
    if not record.bandwidth:
        return  # nothing runs here, or there is no time
    compiles = options.compile and not options.tiny
    if compiles:
        record.part("torch.compile", 60, lambda: {"compiler": [compiler(device)]})
        compiles = bool(record.lines("compiler"))

    def sweep(some: Sequence[int], mode: str) -> None:
        for batch in some:
            for label, load, prompts, weight in measured:
                part = partial(cases, label, load, prompts, batch, mode)
                record.part(f"{label}, batch {batch}, {mode}", weight * taking[mode], part)

    record.part(f"equality, {GRAPHS}", 0 if options.tiny else 60, partial(equal, GRAPHS))
    sweep(batches[:1], GRAPHS)
    sweep(batches[:1], EAGER)
    for label, load, _, weight in measured:
        record.part(f"{label}, forwards", weight * 15, partial(compared, label, load))
    for label, load, prompts, weight in measured:
        record.part(f"{label}, transformers", weight * 10, partial(outside, label, load, prompts, "dynamic cache"))
    sweep(batches[1:], GRAPHS)
    if compiles:
        record.part(f"equality, {COMPILED}", 90, partial(equal, COMPILED))
        sweep(batches[:1], COMPILED)
    sweep(batches[1:], EAGER)
    if compiles:
        label, load, prompts, _ = measured[-1]
        static = partial(outside, label, load, prompts, "static cache, compiled", cache_implementation="static")
        record.part(f"{label}, transformers, static cache", 90, static)
        sweep(batches[1:], COMPILED)


def launch(deadline: float, work: Path, *command: str | Path) -> bool:
    """A command in the work folder, interrupted when the time is over; each of them goes on where it stopped.

    Returns:
        Whether it came to its end.
    """
    print("$ python", *command, flush=True)
    process = subprocess.Popen(
        [sys.executable, *map(str, command)], cwd=work, env=commands.child_variables(), start_new_session=True
    )
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
        sizes = [f"--{name}={value}" for name, value in {**TARGET, "steps": options.target_steps}.items()]
        data = ["--data", *(str(Path(file).resolve()) for file in options.data)]
        recipe = REPOSITORY / "train/quickstart_target.py"
        if not launch(deadline, work, recipe, "--output=target", "--resume", *sizes, *data):
            return False
        (work / "target-is-done").touch()
    if not (work / "train.jsonl").exists():
        rows = conversations(options.conversations)
        write_whole(work / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    given = {"training.max_minutes": options.training_minutes, **VARIANTS}
    changes = ",".join(f"{name}={value}" for name, value in given.items())
    ended = launch(
        deadline, work, "-m", "eval.ablate", "baselines", "--target=target", "--data=train.jsonl",
        f"--measure.prompts={REPOSITORY / 'data/bench.jsonl'}", "--output=baselines", f"--override=[{changes}]",
        "--search=null", "--measure.fit=0",  # which would take longer than a call
        "--title=SHAPE and its baselines for a larger target, on a GPU", *options.ablate,
    )  # fmt: skip
    if ended:
        table = Path(options.output) / "baselines"
        table.mkdir(parents=True, exist_ok=True)
        for name in ("ablation.json", "ablation.md"):
            shutil.copy(work / "baselines" / name, table)
    return ended


main = commands.program(run, GpuOptions)


if __name__ == "__main__":
    main()
