"""`train/slurm.sh` with an srun that says how it was called, and without a cluster."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT


def said(tmp_path: Path, *options: str) -> list[str]:
    """The arguments of srun, where the script runs in that folder."""
    srun = tmp_path / "srun"
    srun.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}
    environment |= {"SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "2"}
    call = ["bash", str(ROOT / "train/slurm.sh"), *options]
    ran = subprocess.run(call, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


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
