"""`train/slurm.sh` with an srun that says how it was called: where it looks for a checkpoint to go on from."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT


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
    (tmp_path / "srun").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "given.yaml").write_text("target: T\noutput: in a file  # that all machines see\n")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}
    environment |= {"SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "2"}

    def said() -> list[str]:
        call = ["bash", str(ROOT / "train/slurm.sh"), *options]
        ran = subprocess.run(call, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        return ran.stdout.splitlines()

    assert "--ckpt_path" not in said()
    (tmp_path / output / "checkpoints").mkdir(parents=True)
    (tmp_path / output / "checkpoints/last.ckpt").touch()
    assert said()[-2:] == ["--ckpt_path", "last"]
