"""The measurement: rounds of all systems of a size, who answer prompts in turn, and the page written anew after each.

    python -m eval.peers --output eval/results/peers --work WORK
    python -m eval.peers --output eval/results/peers --work WORK --sizes '[1.2B]' --rounds 2

The same command goes on where it was interrupted, and more rounds, sizes or peers add to what was measured. The first
run makes the environments and models, which takes most of an hour and 25 GB; `--prepare true` does that alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eval import commands
from eval.peers.environments import Program, model_of, python_of
from eval.peers.sizes import SIZES, end_tokens, prompts, saved
from eval.peers.systems import PEERS, System
from eval.peers.table import lines_of, report
from shape.data.conversations import evenly
from shape.errors import ConfigError, require
from shape.evaluation.environment import Environment
from shape.evaluation.estimates import few_units_note
from shape.evaluation.journal import JOURNAL, Journal
from shape.evaluation.runner import rotated

_WARM_UP_TOKENS = 24  # in which drafts of all sizes come, whose kernels are compiled at the first of each


@dataclass
class PeersOptions:
    """What to measure.

    Args:
        output: folder for peers.json and peers.md.
        work: folder for environments, models, logs and the journal.
        sizes: columns of the tables.
        peers: systems by program.
        rounds: turns of each system.
        threads: of every system; None takes what torch does.
        memory: GB that loaded models may take together; a system that does not fit beside the others is loaded again
            in every round.
        new_tokens: of an answer; None takes each size's own.
        limit: prompts of each size at most.
        prepare: make environments and models, and measure nothing.
    """

    output: Path = Path("peers-results")
    work: Path = Path("peers-work")
    sizes: list[str] = field(default_factory=lambda: list(SIZES))
    peers: list[str] = field(default_factory=lambda: list(PEERS))
    rounds: int = 5
    threads: int | None = None
    memory: float = 12.0
    new_tokens: int | None = None
    limit: int | None = None
    prepare: bool = False


def check(options: PeersOptions) -> None:
    """Raises ConfigError."""
    for name, given, known in (("sizes", options.sizes, SIZES), ("peers", options.peers, PEERS)):
        if not given or not set(given) <= set(known):
            raise ConfigError(f"{name} are {given}; give some of {', '.join(known)}")
    require(options, "rounds limit", least=1)
    require(options, "new_tokens", least=2)


def systems(size: str, peers: Sequence[str]) -> list[System]:
    """Those that run at a size. In float32 only the shipped target: nobody decodes larger ones so."""
    found = [System(peer, precision) for peer in peers for precision in PEERS[peer].precisions]
    return [one for one in found if one.precision != "float32" or SIZES[size].shipped]


def turns(size: str, options: PeersOptions, threads: int, done: set[tuple[str, str, int]]) -> Iterator[dict[str, Any]]:
    """Measure what is not done yet, a record for each turn of a system.

    A machine's speed drifts within minutes: all systems that fit into memory together answer a prompt before the next.

    Args:
        done: names of systems with sizes and rounds.
    """
    entry, every = SIZES[size], systems(size, options.peers)
    texts, end = evenly(prompts(size), options.limit), end_tokens(saved(size, options.work))
    asked = {"new_tokens": options.new_tokens or entry.new_tokens, "end_tokens": end}
    loaded: dict[System, Program] = {}
    try:
        for turn in range(options.rounds):
            waiting = [one for one in rotated(every, turn) if (one.name, size, turn) not in done]
            while waiting:
                together: list[System] = []
                while waiting and not (together and _too_large(loaded, options)):
                    together.append(waiting.pop(0))
                    if together[-1] not in loaded:
                        loaded[together[-1]] = Program(together[-1], size, options.work, threads)
                        _warm_up(loaded[together[-1]], together[-1].methods(entry.shipped), texts, asked)
                answers: dict[System, dict[str, list[dict[str, Any]]]] = {
                    one: {method: [] for method in one.methods(entry.shipped)} for one in together
                }
                for number, text in enumerate(texts):
                    for system in rotated(together, number):
                        for method, found in answers[system].items():
                            found.append(loaded[system].ask({**asked, "prompt": text, "method": method}))
                for system in together:
                    yield {
                        "size": size,
                        "peer": system.peer,
                        "precision": system.precision,
                        "round": turn,
                        "versions": loaded[system].versions,
                        "answers": answers[system],
                    }
                if _too_large(loaded, options):
                    loaded.pop(together[-1]).close()
    finally:
        for program in loaded.values():
            program.close()


def _too_large(loaded: dict[System, Program], options: PeersOptions) -> bool:
    return sum(one.memory for one in loaded.values()) > options.memory


def _warm_up(program: Program, methods: Sequence[str], texts: Sequence[list[int]], asked: dict[str, Any]) -> None:
    """A text of each length, for which a system may compile kernels or lay out memory."""
    for method in methods:
        for text in {len(text): text for text in texts}.values():
            program.ask({**asked, "new_tokens": _WARM_UP_TOKENS, "prompt": text, "method": method})


def notes(options: PeersOptions, threads: int, records: Sequence[dict[str, Any]]) -> list[str]:
    """What was measured, and with what."""
    versions: dict[str, dict[str, None]] = {}
    for record in records:
        for name, number in record["versions"].items():
            versions.setdefault(name, {})[number] = None
    commits = sorted({str(record["commit"]) for record in records})
    rounds = {record["size"]: record["round"] + 1 for record in sorted(records, key=lambda one: one["round"])}
    shown = [f"{name} ({rounds[name]} rounds): {_shape_text(name, options)}" for name in SIZES if name in rounds]
    return [
        f"Greedy, batch size 1, {threads} threads for every system, which answer prompts in turn, in "
        "rounds, with the same token ids. In brackets 95 % bootstrap intervals over prompts, whose rounds stay "
        f"together, where there are several; {few_units_note('prompts')}. "
        + "; ".join(shown)
        + ". OpenVINO and llama.cpp run with their defaults, but for the threads and in float32 the KV cache, and in "
        "formats made by optimum-intel and by llama.cpp, which is compiled without AMX, as it crashes with it. Int8 "
        "and int4 quantise weights, each in its own way: their answers are those of the quantised model.",
        ", ".join(f"{name} {' and '.join(numbers)}" for name, numbers in sorted(versions.items()))
        + f". Measured at commit {', '.join(commits)}.",
    ]


def _shape_text(name: str, options: PeersOptions) -> str:
    size = SIZES[name]
    tokens, count = options.new_tokens or size.new_tokens, min(size.prompts, options.limit or size.prompts)
    if size.shipped:
        return f"the shipped target (12.6M) answers {count} first turns of the bench split with {tokens} tokens at most"
    return f"a random Llama, prompts ({count}) of {size.length} random tokens, {tokens} new ones"


def run(options: PeersOptions) -> None:
    """Prepares, measures, and writes peers.json and peers.md after every turn."""
    check(options)
    for size in options.sizes:
        for system in tqdm(systems(size, options.peers), desc=f"environments and models, {size}"):
            python_of(system.peer, options.work)
            model_of(system, size, options.work)
    if options.prepare:
        return
    environment = Environment.capture(torch.device("cpu"))
    threads = options.threads or environment.threads
    header = {
        "cpu": environment.cpu, "threads": threads, "new_tokens": options.new_tokens, "limit": options.limit
    }  # fmt: skip
    environment = replace(environment, threads=threads)
    journal = Journal(options.work / JOURNAL, header)
    records = journal.records
    done = {(System(one["peer"], one["precision"]).name, one["size"], one["round"]) for one in records}
    for size in options.sizes:
        total = len(systems(size, options.peers)) * options.rounds
        for record in tqdm(turns(size, options, threads, done), desc=size, unit="turn", total=total):
            record["commit"] = environment.commit
            journal.append(record)
            records.append(record)
            write(options, environment, records)
    print(write(options, environment, records))


def write(options: PeersOptions, environment: Environment, records: Sequence[dict[str, Any]]) -> str:
    """peers.json, without the texts, and peers.md."""
    return commands.write_results(
        options.output,
        "peers",
        {"turns": [_without_tokens(record) for record in records]},
        *report(lines_of(records), notes(options, environment.threads, records)),
        environment=environment,
    )


def _without_tokens(record: dict[str, Any]) -> dict[str, Any]:
    counted = {
        method: [{**answer, "tokens": len(answer["tokens"])} for answer in answers]
        for method, answers in record["answers"].items()
    }
    return {**record, "answers": counted}


main = commands.program(run, PeersOptions)


if __name__ == "__main__":
    main()
