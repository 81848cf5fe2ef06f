"""Drafters served by vLLM against ours: the same tokens, the same acceptance at every position, and the speed-up there.

    python -m eval.parity --vllm VLLM_ENVIRONMENT/bin/python --output eval/results/parity

Drafters are trained by their configurations here, for a few minutes, and exported as vLLM loads them; the shipped one
is served by `shape.serving.vllm`. Both sides draft chains of one depth for the same prompts, greedily, in float32, one
prompt at a time; what was measured before stays measured. Writes `parity.json` and `parity.md`,
where methods that are not measured anew stay.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eval import commands
from shape import bundled
from shape.data.backends import until_end
from shape.drafters import TreeShape
from shape.errors import ConfigError, ShapeError
from shape.evaluation.estimates import Estimate, Sums, over_prompts, ratio
from shape.evaluation.journal import refuse_other
from shape.evaluation.markdown import DASH, Table, markdown, share, show
from shape.evaluation.prompts import chosen_prompts
from shape.generation.decoder import ShapeDecoder
from shape.target.model import Target

_LAYERS = "[1, 3, 5]"  # that any of them reads
_NARROW = ("--predictor.hidden_size", "256", "--predictor.own_embeddings", "true")  # the target has 384
_SHIPPED = "quickstart-shape"
_ANSWERS = Path(__file__).parent / "reference" / "answers.py"


@dataclass(frozen=True)
class Served:
    """How a drafter comes to vLLM.

    Attributes:
        depth: draft tokens of a chain.
        config: that it is trained by; None for the predictor that ships.
        form: what it is converted to.
        method: vLLM's name for it.
        options: of the training, where vLLM does not read what the configuration makes.
    """

    depth: int
    config: str | None = None
    form: str = ""
    method: str = ""
    options: tuple[str, ...] = ()


METHODS = {
    "shape": Served(4),
    "eagle": Served(4, "eagle.yaml", "eagle3", "eagle3"),
    "medusa": Served(4, "medusa.yaml", "medusa", "medusa", ("--predictor.draft_vocab_size", "null")),
    "dflash": Served(6, "dflash.yaml", "speculators", "dflash"),
    "narrow": Served(4, "eagle.yaml", "speculators", "eagle3", _NARROW),
}


@dataclass
class ParityOptions:
    """What to measure.

    Args:
        vllm: Python of the environment that has vLLM (and shape, for the predictor that ships).
        output: folder of parity.json and parity.md.
        work: folder of trained and exported drafters, which are made once, and of logs.
        methods: of shape, eagle, medusa, dflash and narrow, an EAGLE-3 narrower than its target.
        prompts: JSON lines of prompts; default: the bundled benchmark.
        limit: prompts, evenly chosen.
        max_new_tokens: longest answer.
        minutes: of each training.
    """

    vllm: str
    output: str = "parity-results"
    work: str = "checkpoints/parity"
    methods: list[str] = field(default_factory=lambda: list(METHODS))
    prompts: str | None = None
    limit: int = 48
    max_new_tokens: int = 96
    minutes: float = 3.0


@dataclass(frozen=True)
class Answer:
    """One side's answer to a prompt: `accepted` counts, for each position, the drafts that were accepted so far."""

    tokens: list[int]
    drafts: int
    accepted: list[int]
    seconds: float = 0.0


@dataclass(frozen=True)
class Counts(Sums):
    """Of one answer: drafts, those accepted up to a position, and seconds."""

    drafts: Any = 0
    accepted: Any = 0
    seconds: Any = 0


def ours(decoder: ShapeDecoder, prompt: Sequence[int], depth: int, max_new_tokens: int) -> Answer:
    """Our answer, counted as vLLM does: each step that begins before the end, with all that it accepts."""
    ids, ends = torch.tensor([list(prompt)]), decoder.target.eos_token_ids
    room = max_new_tokens + depth + 1  # and no end token, so that no step is cut
    tokens: list[int] = []
    steps: list[int] = []
    for new in decoder.stream(ids, torch.ones_like(ids), do_sample=False, max_new_tokens=room, eos_token_id=[]):
        steps += [len(new) - 1] if tokens else []
        tokens += new
        answer = until_end(tokens, ends)[:max_new_tokens]
        if len(answer) == max_new_tokens or answer[-1] in ends:
            break
    return Answer(answer, len(steps), [sum(step > at for step in steps) for at in range(depth)])


def rates(answers: Sequence[Answer]) -> list[Estimate]:
    """Share of drafts whose tokens were accepted up to each position."""
    return [
        over_prompts(lambda all: ratio(all.accepted, all.drafts), [Counts(a.drafts, a.accepted[at]) for a in answers])
        for at in range(len(answers[0].accepted))
    ]


def speed_up(drafted: Sequence[Answer], plain: Sequence[Answer]) -> Estimate:
    times = [[Counts(seconds=answer.seconds) for answer in answers] for answers in (plain, drafted)]
    return over_prompts(lambda one, other: ratio(one.seconds, other.seconds), *times)


class Parity:
    """Both sides' answers to the same prompts. Files lie in the folder of work."""

    def __init__(self, options: ParityOptions) -> None:
        self.options, self.work = options, Path(options.work)
        self.work.mkdir(parents=True, exist_ok=True)
        self.target = Target.load("quickstart-target", dtype="float32")
        chosen, _ = chosen_prompts(options.prompts, options.limit)
        self.prompts = [self.target.encode(prompt.opening, prompt.template)[0].tolist() for prompt in chosen]

    def measure(self, name: str, plain: Sequence[Answer]) -> dict[str, Any]:
        """Figures of one method."""
        served = METHODS[name]
        predictor, engine, made_by = self._drafter(name, served)
        tree = TreeShape(width=1, depth=served.depth)
        decoder = ShapeDecoder.from_pretrained(predictor, target=self.target, tree=tree, fall_back=False)
        mine = [ours(decoder, ids, served.depth, self.options.max_new_tokens) for ids in tqdm(self.prompts, desc=name)]
        theirs = self.vllm(name, engine)
        return {
            "commands": [*made_by, f"LLM({', '.join(f'{key}={value!r}' for key, value in engine.items())})"],
            "prompts": len(plain),
            "equal_to_vllm": sum(one.tokens == other.tokens for one, other in zip(theirs, plain, strict=True)),
            "equal_to_ours": sum(one.tokens == other.tokens for one, other in zip(theirs, mine, strict=True)),
            "drafts": [sum(answer.drafts for answer in side) for side in (mine, theirs)],
            "ours": [asdict(rate) for rate in rates(mine)],
            "vllm": [asdict(rate) for rate in rates(theirs)],
            "speed_up": asdict(speed_up(theirs, plain)),
        }

    def _drafter(self, name: str, served: Served) -> tuple[str, dict[str, Any], list[str]]:
        """Our folder of the drafter, what vLLM's engine is given, and the commands that made them."""
        depth = {"num_speculative_tokens": served.depth}
        if served.config is None:
            proposer = {"model": "shape.serving.vllm.ShapeProposer", **depth}
            options = {"shape": {"predictor": _SHIPPED}}
            return _SHIPPED, {"speculative_config": proposer, "additional_config": options}, []
        trained, exported = self.work / name, self.work / f"{name}-{served.form}"
        train = ["shape.train", "--config", f"configs/{served.config}", *served.options, "--output", str(trained)]
        train += ["--training.max_minutes", f"{self.options.minutes:g}", "--measurement.limit", "0"]
        train += ["--features", str(self.work / "features"), "--extraction.more_layers", _LAYERS]  # the same for all
        convert = ["shape.convert", str(trained), "--to", served.form, "--output", str(exported)]
        for arguments, made in ((train, trained), (convert, exported)):
            if not (made / "config.json").exists():
                _run([sys.executable, "-m", *arguments], self.work / f"{name}.log")
        speculative = {"method": served.method, "model": str(exported), **depth}
        return (
            str(trained),
            {"speculative_config": speculative},
            [f"python -m {shlex.join(arguments)}" for arguments in (train, convert)],
        )

    def vllm(self, name: str, engine: dict[str, Any]) -> list[Answer]:
        """vLLM's answers, by a process of their own."""
        sizes = {"model": bundled.resolve("quickstart-target"), "dtype": "float32", "max_model_len": 1024}
        job = {
            # Drafters do not see the states of a prefix that is cached.
            "engine": {**sizes, "max_num_seqs": 4, "enable_prefix_caching": False, **engine},
            "max_new_tokens": self.options.max_new_tokens,
            "prompts": self.prompts,
        }
        asked, answered = self.work / f"{name}-job.json", self.work / f"{name}-answers.json"
        asked.write_text(json.dumps(job), encoding="utf-8")
        _run([self.options.vllm, str(_ANSWERS), str(asked), str(answered)], self.work / f"{name}-vllm.log")
        return [Answer(**each) for each in json.loads(answered.read_text(encoding="utf-8"))]


def _run(command: list[str], log: Path) -> None:
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
    with log.open("a", encoding="utf-8") as file:
        if subprocess.run(command, env=environment, stdout=file, stderr=file, check=False).returncode:
            raise ShapeError(f"`{shlex.join(command)}` failed; see {log}")


def tables(methods: dict[str, Any]) -> list[Table]:
    """Methods beside each other, and their acceptance by position."""
    rows, positions = [], []
    for name, found in methods.items():
        sides = {side: [Estimate(**rate) for rate in found[side]] for side in ("ours", "vllm")}
        lengths = [1 + sum(rate.value or 0.0 for rate in rates) for rates in sides.values()]
        prompts = found["prompts"]
        equal = [share(found[f"equal_to_{whom}"], prompts) for whom in ("vllm", "ours")]
        speed = Estimate(**found["speed_up"]).text("x")
        rows.append([name, *equal, *map(str, found["drafts"]), *map(show, lengths), speed])
        for side, rates in sides.items():
            positions.append([f"{name}, {side}", *(rate.text() for rate in rates)])
    most = max(map(len, positions), default=1)
    head = ["drafter", "as vLLM's plain", "as ours", "drafts, ours", "in vLLM", "tokens per draft, ours", "in vLLM"]
    return [
        ([*head, "speed-up in vLLM"], rows),
        (["accepted up to", *map(str, range(1, most))], [[*row, *[DASH] * (most - len(row))] for row in positions]),
    ]


def note(options: dict[str, Any]) -> str:
    return (
        f"Greedy, float32, one prompt at a time, at most {options['max_new_tokens']} tokens each, chains of one depth "
        "on both sides. First table: prompts answered token for token as by vLLM without drafts, and as by us with the "
        "same drafts; drafts, and 1 + accepted tokens per draft; time of vLLM's answers without drafts over that with "
        "them, prefill included, the shortest of three each. Second table: share of drafts accepted up to each "
        "position. Intervals: 95 %, bootstrap over prompts."
    )


def run(options: ParityOptions) -> dict[str, Any]:
    """Measures the methods, and writes them beside those in parity.json."""
    if unknown := [name for name in options.methods if name not in METHODS]:
        raise ConfigError(f"{unknown[0]} is no method here; choose from {', '.join(METHODS)}")
    folder = Path(options.output)
    known = folder / "parity.json"
    before = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {"methods": {}}
    if before["methods"]:
        asked = {name: getattr(options, name) for name in ("prompts", "limit", "max_new_tokens", "minutes")}
        refuse_other(known, before["options"], asked)
    methods = before["methods"]
    parity = Parity(options)
    plain = parity.vllm("plain", {})
    for name in options.methods:
        methods[name] = parity.measure(name, plain)
        record = {"options": asdict(options), "methods": methods}
        given = "\n".join(command for found in methods.values() for command in found["commands"])
        parts = ["### Parity with vLLM", *(markdown(*table) for table in tables(methods)), note(record["options"])]
        commands.write_results(folder, "parity", record, *parts, f"```\n{given}\n```")
    return methods


main = commands.program(run, ParityOptions)


if __name__ == "__main__":
    main()
