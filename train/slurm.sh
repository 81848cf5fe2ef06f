#!/usr/bin/env bash
# Train on a SLURM cluster, one process per GPU, in a folder that all machines see:
#   sbatch --nodes 2 train/slurm.sh --target T --data D --output /shared/DIR
# A job that is stopped goes on by the same command: it resumes from the last checkpoint in the output folder, on as many
# machines as it gets. At its time limit, and where the cluster preempts it, it writes one and is queued again.
#SBATCH --job-name=shape
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=shape-%j.log
set -euo pipefail
# Where the run writes, whether an option says so, a configuration or a default; YAML quotes some names.
output=$("${PYTHON:-python}" -m shape.train "$@" --print_config | sed -n "s/^output: //p" | tr -d "'")
resume=()
if compgen -G "$output/checkpoints/last*.ckpt" > /dev/null; then
    resume=(--ckpt_path last)
fi
# At the signal: SIGTERM lets all processes end a step together and write a checkpoint. Not by srun, which makes SIGKILL
# of it.
requeue() {
    scancel --signal=TERM "$SLURM_JOB_ID" && wait "$training" || true
    scontrol requeue "$SLURM_JOB_ID"
}
trap requeue USR1
# Lightning reads rank and addresses from SLURM's variables; a process that fails ends the others.
srun --kill-on-bad-exit=1 "${PYTHON:-python}" -m shape.train --trainer.strategy ddp \
    --trainer.devices "$SLURM_NTASKS_PER_NODE" --trainer.num_nodes "$SLURM_NNODES" \
    "$@" ${resume[@]+"${resume[@]}"} &
training=$!
wait "$training"  # which the signal ends
