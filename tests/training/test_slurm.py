"""`train/slurm.sh` with an srun that says how it was called, and without a cluster."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from pytorch_lightning.plugins.environments import SLURMEnvironment
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from shape.features.trainer import TrainerOptions


def cluster(folder: Path, **commands: str) -> dict[str, str]:
    """An environment where these commands are bash scripts."""
    for name, script in commands.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (folder / name).chmod(0o755)
    there = {"SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": sys.executable} | there


def said(tmp_path: Path, *options: str) -> list[str]:
    """The arguments of srun, where the script runs in that folder."""
    environment = cluster(tmp_path, srun='printf "%s\\n" "$@"')
    call = ["bash", str(ROOT / "train/slurm.sh"), *options]
    ran = subprocess.run(call, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


def test_before_its_time_is_up_a_job_ends_its_step_and_is_queued_again(tmp_path):
    """SLURM signals the script, which has the processes asked to end, waits for them, and only then asks for another
    turn. srun itself must get no SIGTERM: it makes SIGKILL of it.
    """
    environment = cluster(
        tmp_path,
        srun="trap 'echo killed; exit 137' TERM; bash task & echo $! > number; wait $!",
        scancel='test "$*" = "--signal=TERM 7" && kill -TERM "$(cat number)"',
        scontrol='echo "$@"',
    )
    (tmp_path / "task").write_text(
        "trap 'sleep 0.5; echo written; exit 130' TERM; echo training; while true; do sleep 0.1; done"
    )
    call = ["bash", str(ROOT / "train/slurm.sh"), "--target=T"]
    with subprocess.Popen(call, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout.readline() == "training\n"
        job.send_signal(signal.SIGUSR1)
        assert job.communicate(timeout=60)[0].splitlines() == ["written", "requeue 7"]


def test_lightning_queues_no_job_again_by_itself(monkeypatch):
    """Its own checkpoint would lie in the working directory, and be taken for that of any Trainer there."""
    for name, value in {"JOB_ID": "7", "NTASKS": "1", "JOB_NAME": "shape", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    options = TrainerOptions(accelerator="cpu", devices=1)
    for trainer in (options.for_extraction(), options.for_training(1, logger=False, enable_checkpointing=False)):
        environment = trainer._accelerator_connector.cluster_environment
        assert isinstance(environment, SLURMEnvironment) and not environment.auto_requeue


def test_torchrun_within_a_job_says_which_process_is_which(monkeypatch):
    slurm = {"JOB_ID": "7", "NTASKS": "1", "JOB_NAME": "shape", "PROCID": "0", "LOCALID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    torchrun = {"TORCHELASTIC_RUN_ID": "1", "RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (torchrun | {"WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # of the whole process, which the Trainer sets
    trainer = TrainerOptions(accelerator="cpu", devices=2, strategy="ddp").for_extraction()
    assert (trainer.global_rank, trainer.world_size) == (1, 2)


def test_srun_is_asked_for_what_shape_train_takes(tmp_path):
    """And for resuming once there is a checkpoint."""
    first = said(tmp_path, "--target", "T", "--output", str(tmp_path / "run"))
    assert "--kill-on-bad-exit=1" in first and "--ckpt_path" not in first
    for option in ("--trainer.devices 4", "--trainer.num_nodes 2", "--target T"):
        assert option in " ".join(first)
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints/last.before.ckpt").touch()
    assert said(tmp_path, "--target", "T", f"--output={tmp_path / 'run'}")[-2:] == ["--ckpt_path", "last"]


@pytest.mark.parametrize(
    ("options", "output"),
    [
        (["--config", "given.yaml"], "in a file"),
        (["--config=given.yaml", "--output=by option"], "by option"),
        (["--target=T"], "checkpoints/shape"),
        ([], "checkpoints/quickstart"),
    ],
)
def test_a_job_goes_on_in_the_folder_that_shape_train_would_write_to(options, output, tmp_path):
    (tmp_path / "given.yaml").write_text("target: T\noutput: in a file  # that all machines see\n")
    assert "--ckpt_path" not in said(tmp_path, *options)
    (tmp_path / output / "checkpoints").mkdir(parents=True)
    (tmp_path / output / "checkpoints/last.ckpt").touch()
    assert said(tmp_path, *options)[-2:] == ["--ckpt_path", "last"]
