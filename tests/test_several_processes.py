"""Several processes: the launch scripts of `train/`, another number of processes, and weights that they share."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from helpers import ROOT
from safetensors.torch import load_file
from training_runs import arguments, write_conversations
from transformers import LlamaConfig, LlamaForCausalLM

from shape.cli.train import main

ENVIRONMENT = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": str(torch.get_num_threads())}
SCRIPTS = sorted((ROOT / "train").glob("*.sh"))


def test_there_are_scripts_to_check():
    assert {script.name for script in SCRIPTS} == {"slurm.sh", "torchrun.sh"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_bash_and_can_be_run(script):
    assert os.access(script, os.X_OK)
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def losses(output: Path) -> dict[int, float]:
    """The loss of every step, over all processes, from all sittings of a run."""
    found = {}
    for log in sorted(output.glob("logs/version_*/metrics.csv")):
        with open(log) as file:
            found |= {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]}
    return found


@pytest.fixture
def options(tiny_target_folder, tmp_path) -> list[str]:
    """Of a run whose steps do not depend on processes but by rounding; texts are very unequal."""
    chosen = {
        "training.batch_size": 48, "training.learning_rate": 5e-3, "training.warmup_steps": 2,
        "training.decay": "none", "training.noise": 0, "predictor.dropout": 0, "training.checkpoint_every": 6,
        "validation.every": 100000, "trainer.log_every_n_steps": 1,
    }  # fmt: skip
    more = [f"--{name}={value}" for name, value in chosen.items()]
    return arguments(tiny_target_folder, write_conversations(tmp_path / "talks.jsonl"), tmp_path, *more)


def launch(*command: str) -> str:
    ran = subprocess.run(
        command,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


def reached(output: Path) -> int:
    return torch.load(output / "checkpoints/last.ckpt", weights_only=True)["global_step"]


def require_the_same_steps(several: Path, one: Path) -> None:
    """The same data in the same order, and the same updates."""
    mine, theirs = losses(several), losses(one)
    assert mine.keys() == theirs.keys() and len(mine) == 12
    apart = max(abs(mine[step] / loss - 1) for step, loss in theirs.items())
    assert apart < 1e-3, f"losses differ by {apart:.2%}: other batches, or other updates"
    weights = [load_file(folder / "checkpoints/best.safetensors") for folder in (one, several)]
    gap = sum((weights[0][name] - weights[1][name]).float().norm() ** 2 for name in weights[0])
    assert gap < 1e-4 * sum(tensor.float().norm() ** 2 for tensor in weights[0].values())


def test_two_processes_take_the_steps_of_one(options, tmp_path):
    """The least that a change has to keep: each has its half of a batch, and gradients are averaged."""
    one, two = tmp_path / "one", tmp_path / "two"
    options += ["--training.steps=2", "--training.warmup_steps=0", "--online=true", "--validation.prompts=2"]
    main([*options, f"--output={one}"])
    given = [option for option in options if not option.startswith("--trainer.devices")]
    launch(str(ROOT / "train/torchrun.sh"), "2", *given, f"--output={two}")
    assert losses(one).keys() == losses(two).keys() and len(losses(one)) == 2
    assert all(abs(losses(two)[step] / loss - 1) < 1e-3 for step, loss in losses(one).items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "sittings"),
    [
        ({}, {2: 6, 3: 12}),
        ({"predictor.attention": "true"}, {2: 6, 1: 12}),
        ({"predictor.kind": "eagle", "predictor.markov_rank": 0, "online": "true"}, {3: 6, 2: 12}),
        # Of whose weights some get no gradient.
        ({"predictor.kind": "block", "losses.soft_cross_entropy": 0}, {2: 12}),
    ],
    ids=["window", "attention", "eagle online", "block, on states alone"],
)
def test_a_run_goes_on_with_another_number_of_processes(options, tmp_path, network, sittings):
    """Through the same steps as one process alone, to rounding; keys are processes, values the steps they reach."""
    one, several = tmp_path / "one", tmp_path / "several"
    options += [f"--{name}={value}" for name, value in network.items()]
    main([*options, f"--output={one}", "--training.steps=12"])
    given = [option for option in options if not option.startswith("--trainer.devices")]
    for number, (processes, steps) in enumerate(sittings.items()):
        more = [f"--training.steps={steps}", *(["--ckpt_path=last"] if number else [])]
        said = launch(str(ROOT / "train/torchrun.sh"), str(processes), *given, f"--output={several}", *more)
        assert processes == 1 or f"MEMBER: {processes}/{processes}" in said
        assert reached(several) == steps and said.count("the predictor is in") == 1
    require_the_same_steps(several, one)
    for shard in (one / "features").glob("[!.]*"):  # none where it is computed online
        assert (several / "features" / shard.name).read_bytes() == shard.read_bytes()


@pytest.mark.slow
def test_processes_that_are_asked_to_end_write_a_checkpoint_together(options, tmp_path):
    """One signal to the launcher, as schedulers send it; data workers are there, and are left in peace."""
    given = [option for option in options if not option.startswith("--trainer.devices")] + ["--training.workers=1"]
    script = [str(ROOT / "train/torchrun.sh"), "2", *given, f"--output={tmp_path}", "--trainer.log_every_n_steps=5"]
    last = tmp_path / "checkpoints/last.ckpt"
    with subprocess.Popen(
        [*script, "--training.steps=100000", "--training.checkpoint_every=3"],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as running:  # fmt: skip
        deadline = monotonic() + 300
        while not last.exists() and monotonic() < deadline and running.poll() is None:
            sleep(0.1)
        running.terminate()
        said = running.communicate(timeout=60)[0]
    assert "interrupted: a checkpoint follows" in said, said
    step = reached(tmp_path)
    assert step % 5 == 0  # where processes ask one another
    launch(*script, f"--training.steps={step + 2}", "--ckpt_path=last")
    assert reached(tmp_path) == step + 2


@pytest.mark.slow
def test_answers_are_written_by_all_processes(options, tiny_target_folder, tmp_path):
    """By those of torchrun in training, and by those that the command starts itself; as one process writes them."""
    given = [option for option in options if not option.startswith(("--trainer.devices", "--regenerate"))]
    given += [
        "--regenerate=true",
        "--regeneration.max_new_tokens=8",
        "--regeneration.batch_size=4",
        "--training.steps=2",
    ]
    for name, script in (("one", "1"), ("two", "2")):
        launch(str(ROOT / "train/torchrun.sh"), script, *given, f"--output={tmp_path / name}")
    one, two = (next((tmp_path / name).glob("features/answers-*.jsonl")) for name in ("one", "two"))
    assert one.name == two.name and one.read_bytes() == two.read_bytes()
    talks, ask = tmp_path / "talks.jsonl", [sys.executable, "-m", "shape.regenerate", "--max_new_tokens=8"]
    ask += [f"--target={tiny_target_folder}", f"--data={talks}", "--batch_size=4", "--trainer.accelerator=cpu"]
    for devices in (1, 2):
        output = tmp_path / f"by-{devices}.jsonl"
        strategy = "ddp" if devices > 1 else "auto"
        said = launch(*ask, f"--output={output}", f"--trainer.devices={devices}", f"--trainer.strategy={strategy}")
        assert said.count("60 conversations (0 left out)") == 1
    assert (tmp_path / "by-1.jsonl").read_bytes() == (tmp_path / "by-2.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "network",
    [{}, {"predictor.kind": "eagle", "predictor.markov_rank": 0, "predictor.own_heads": "true"}],
    ids=["window", "eagle"],
)
def test_weights_shared_out_by_fsdp_are_trained_alike(options, tmp_path, network):
    """By two processes on a CPU; resumed in the middle, then by one process that has all; validated, exported whole."""
    one, several = tmp_path / "one", tmp_path / "several"
    options += ["--training.checkpoint_every=4", *(f"--{name}={value}" for name, value in network.items())]
    main([*options, f"--output={one}", "--training.steps=12"])
    given = [option for option in options if not option.startswith("--trainer.devices")]
    for number, (processes, steps) in enumerate(((2, 4), (2, 8), (1, 12))):
        more = [f"--training.steps={steps}", *(["--ckpt_path=last"] if number else [])]
        more += ["--trainer.strategy=fsdp"] if processes > 1 else []
        said = launch(str(ROOT / "train/torchrun.sh"), str(processes), *given, f"--output={several}", *more)
        assert reached(several) == steps, said
    require_the_same_steps(several, one)
    exported = [load_file(folder / "model.safetensors") for folder in (one, several)]
    assert {name: tensor.shape for name, tensor in exported[0].items()} == {
        name: tensor.shape for name, tensor in exported[1].items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True], ids=["online", "stored"])
def test_a_target_shared_out_trains_as_a_whole_one(options, tmp_path, stored):
    """Over two processes; the same weights to the last bit, resumed in the middle. In float64, which is not prepacked:
    products of a whole target are torch's then too. Stored features are those that the whole target's run has written.
    """
    given = [option for option in options if not option.startswith("--trainer.devices")] + ["--dtype=float64"]
    given.append(f"--features={tmp_path / 'features'}" if stored else "--online=true")
    for name, more in (("whole", []), ("cut", ["--shard_target=true"])):
        for steps, resume in ((6, []), (12, ["--ckpt_path=last"])):
            script = [str(ROOT / "train/torchrun.sh"), "2", *given]
            said = launch(*script, f"--output={tmp_path / name}", f"--training.steps={steps}", *more, *resume)
            assert ("target: each process holds" in said) == (name == "cut")
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")
    whole, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for the memory of a process")
def test_no_process_takes_memory_for_the_whole_target(tmp_path):
    """A checkpoint's files are mapped, and read as far as a process keeps them: half of the blocks each, of two."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "vocab_size": 512}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=12)).bfloat16()
    model.save_pretrained(tmp_path)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    said = launch(*run, str(ROOT / "tests/sharded_target.py"), str(tmp_path))
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    whole, mine = 2 * found["whole"], 2 * found["mine"]
    assert mine < 0.52 * whole and whole > 250e6
    assert found["loaded"] < 0.25 * whole
    assert mine < found["after"] < mine + 0.25 * whole


@pytest.mark.slow
def test_processes_that_share_a_target_run_as_many_forwards_as_each_other(tmp_path):
    """Also where the texts of one are on both sides of a change of the rotary table, and of another on one."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24,
        "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    }  # fmt: skip
    config = LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=96, rope_parameters=rope)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    launch(*run, str(ROOT / "tests/sharded_switch.py"), str(tmp_path))
