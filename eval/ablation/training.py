"""Carries out the trainings of an ablation, as processes that go on where they were interrupted."""

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import count
from pathlib import Path
from threading import Event

import torch
import yaml
from safetensors import safe_open

from eval.ablation.plan import Run, by_seed
from eval.ablation.results import Trained
from eval.commands import child_variables
from shape.errors import CheckpointError, ConfigError
from shape.evaluation.environment import Environment
from shape.files import reading, typed, write_whole


def train_all(runs: Sequence[Run], jobs: int, needed: bool = True) -> dict[str, dict[int, Trained]]:
    """Train what is missing, `jobs` at once: by variant and seed.

    Args:
        needed: every one of them; else what fails is told and left out.

    Raises:
        CheckpointError: a training failed; those that have not begun by then never do.
    """
    threads = max(1, torch.get_num_threads() // jobs)
    numbers, failed = count(1), Event()

    def one(run: Run) -> Trained | None:
        if failed.is_set():
            return None
        print(f"training {next(numbers)} of {len(runs)}: {run.name}; output in {run.folder / 'train.log'}", flush=True)
        try:
            return train(run, threads)
        except CheckpointError as error:
            if not needed:
                print(f"left out: {error}", flush=True)
                return None
            failed.set()
            raise
        except BaseException:
            failed.set()
            raise

    found: dict[str, dict[int, Trained]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for run, trained in zip(runs, pool.map(one, runs), strict=True):
                if trained is not None:
                    found.setdefault(run.variant, {})[run.seed] = trained
        except KeyboardInterrupt:
            failed.set()
            for process in tuple(_RUNNING):
                process.terminate()
            raise
    return found


def train(run: Run, threads: int) -> Trained:
    """Train unless that is done; an interrupted run goes on from its last checkpoint.

    In a process of its own: the next run starts with a clean memory, a crash costs one run, and several devices are
    launched as for any other command.

    Raises:
        CheckpointError: the training failed.
    """
    if not _is_done(run):
        _carry_out("shape.train", [f"--config={_options_file(run)}"], run.name, run.folder, threads)
        _keep(run, threads)
    found = _kept(run)
    if run.options.training.max_minutes is not None and found.environment["threads"] != threads:
        raise ConfigError(
            f"{run.folder} was trained with {found.environment['threads']} threads, and in the same time {threads} do "
            "other work; give the same jobs, or another output folder"
        )
    return found


def train_together(runs: Sequence[Run], output: Path) -> dict[str, dict[int, Trained]]:
    """The same of all runs of a seed at once.

    Raises:
        CheckpointError: the training failed.
    """
    threads = torch.get_num_threads()
    for group in by_seed(runs):
        if not all(map(_is_done, group)):
            folder, names = output / "runs" / f"together-{group[0].seed}", ", ".join(run.name for run in group)
            print(f"training together: {names}; output in {folder / 'train.log'}", flush=True)
            files = [str(_options_file(run)) for run in group]
            _carry_out("shape.joint", [*files, f"--output={folder}"], folder.name, folder, threads)
            for run in group:
                _keep(run, threads)
    return {run.variant: {each.seed: _kept(each) for each in runs if each.variant == run.variant} for run in runs}


def _options_file(run: Run) -> Path:
    run.folder.mkdir(parents=True, exist_ok=True)
    options = run.folder / "options.yaml"
    options.write_text(yaml.safe_dump(run.values, sort_keys=False), encoding="utf-8")
    return options


def _carry_out(module: str, arguments: list[str], name: str, folder: Path, threads: int) -> None:
    """A command from its beginning, or from the last checkpoint in its folder.

    Raises:
        CheckpointError: it failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "train.log"
    resume = ["--ckpt_path=last"] if (folder / "checkpoints/last.ckpt").exists() else []
    if status := _launch(module, [*arguments, *resume], log, threads):
        last = next(
            (line for line in reversed(log.read_text(encoding="utf-8").splitlines()) if line.strip()), "it said nothing"
        )
        raise CheckpointError(
            f"the training of {name} ended with status {status} ({last.strip()}); see {log}, and run the same command "
            "again to go on"
        )


# Commands under way, each in a session of its own: an interrupt reaches them through this process alone, once, and they
# keep what they have.
_RUNNING: set[subprocess.Popen[bytes]] = set()


def _launch(module: str, arguments: list[str], log: Path, threads: int) -> int:
    """A command as a process, its exit status; what it says goes to the end of a file."""
    with log.open("a", encoding="utf-8") as file:
        command = [sys.executable, "-m", module, *arguments]
        variables = child_variables(OMP_NUM_THREADS=str(threads))
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
    _RUNNING.add(process)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    finally:
        _RUNNING.discard(process)


def _is_done(run: Run) -> bool:
    return (run.folder / "run.json").exists()


def _keep(run: Run, threads: int) -> None:
    """Write down what a finished training was."""
    write_whole(run.folder / "run.json", json.dumps(asdict(_trained(run, threads)), indent=1))


def _kept(run: Run) -> Trained:
    done = run.folder / "run.json"
    with reading(str(done), CheckpointError, "delete it, and the training is looked at again"):
        return typed(Trained, json.loads(done.read_text(encoding="utf-8")))


def _trained(run: Run, threads: int) -> Trained:
    record = json.loads((run.folder / "config.json").read_text(encoding="utf-8"))["training"]
    on_gpu = run.options.trainer.accelerator != "cpu" and torch.cuda.is_available()
    return Trained(
        parameters=_parameters(run.folder / "model.safetensors"),
        steps=record["steps"],
        seconds=max(record["seconds"] - record["validation_seconds"], 0.0),
        positions_per_second=record.get("positions_per_second"),
        record=record,
        environment={**asdict(Environment.capture(torch.device("cuda" if on_gpu else "cpu"))), "threads": threads},
    )


def _parameters(weights: Path) -> int:
    """Numbers in an exported predictor of any kind; integers are no parameters."""
    with safe_open(weights, framework="pt") as file:
        slices = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118 - not a mapping
    return sum(torch.Size(one.get_shape()).numel() for one in slices if "F" in one.get_dtype())
