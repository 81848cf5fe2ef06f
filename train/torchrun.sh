#!/usr/bin/env bash
# Train with several processes by torchrun, on one machine:
#   train/torchrun.sh 8 --target T --data D --output DIR
# on several, the same on each, with its number, the first one's address, and a folder that all of them see:
#   NODES=2 NODE=0 HEAD=host0:29500 train/torchrun.sh 8 --target T --data D --output /shared/DIR
# Where a run was stopped, give the same, with --ckpt_path last once training itself has begun; the number of processes may be another one.
set -euo pipefail
processes=${1:?give the number of processes per machine, then the options of shape.train}
shift
nodes=${NODES:-1}
if [ "$nodes" -gt 1 ]; then
    meet=(--nnodes "$nodes" --node_rank "${NODE:?number of this machine, from 0}" --rdzv_backend static
          --master_addr "${HEAD%:*}" --master_port "${HEAD##*:}")
else
    meet=(--standalone)
fi
# Seconds from a request to end until processes are killed: they end a step together and write a checkpoint.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}
exec "${PYTHON:-python}" -m torch.distributed.run "${meet[@]}" --nproc_per_node "$processes" -m shape.train \
    --trainer.strategy ddp --trainer.devices "$processes" --trainer.num_nodes "$nodes" "$@"
