# What the sbatch files share: environment, torchrun's words, stopping and going on. Sourced with
# the checkout as the working folder; defines functions and sets the environment.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$ROOT" || exit 2
source launch/environment.sh

say() { printf '[%s] %s\n' "$(date '+%F %T')" "$*" >&2; }

# An environment that is active (a container's, conda's) goes first; else the checkout's own.
if ! command -v torchrun >/dev/null && [ -d "$ROOT/.venv/bin" ]; then
  export PATH="$ROOT/.venv/bin:$PATH" VIRTUAL_ENV="$ROOT/.venv"
fi
if ! command -v torchrun >/dev/null; then
  say "torchrun: not found; make the environment on this cluster first, with bash launch/test.sh" \
    "or launch/container/Dockerfile, or activate your own before sbatch"
  exit 2
fi

# srun gives a task one core unless it is told; since Slurm 22.05 it no longer asks the job.
cores=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-}}
[ -z "$cores" ] || export SRUN_CPUS_PER_TASK=$cores

# ranks_per_node: one a GPU that Slurm gave; EYRIE_RANKS says otherwise, as on machines without.
ranks_per_node() {
  local ranks=${EYRIE_RANKS:-${SLURM_GPUS_ON_NODE:-}}
  if [ -z "$ranks" ]; then
    say "Slurm gave this job no GPUs; set EYRIE_RANKS to the processes of a node, as 1, to compute" \
      "on CPUs, or ask for GPUs with sbatch --gpus-per-node=8"
    return 2
  fi
  echo "$ranks"
}

# node_names: the nodes of the allocation, one a line.
node_names() { scontrol show hostnames "$SLURM_JOB_NODELIST"; }

# rendezvous RANKS: torchrun's words for an allocation of several nodes, one a line. All nodes run
# the same words; the first one holds the store. The port follows the job, for two jobs may share a
# node; the id follows the restart, so that a rank left over from before cannot join.
rendezvous() {
  local first
  first=$(node_names | head -n 1)
  printf '%s\n' "--nnodes=$SLURM_JOB_NUM_NODES" "--nproc-per-node=$1" \
    --rdzv-backend=c10d "--rdzv-endpoint=$first:$((20000 + SLURM_JOB_ID % 20000))" \
    "--rdzv-id=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
}

# hostfile RANKS: the nodes as DeepSpeed's launcher reads them.
hostfile() { node_names | sed "s/\$/ slots=$1/"; }

# environment_file: the variables of launch/environment.sh as DeepSpeed's launcher carries them to
# other nodes, from .deepspeed_env in the working folder.
environment_file() {
  local name
  for name in "${EYRIE_ENVIRONMENT[@]}"; do printf '%s=%s\n' "$name" "${!name}"; done
}

stopped=""
step=""
trap 'stopped=1; [ -z "$step" ] || kill -TERM "$step" 2>/dev/null' TERM

# run COMMAND...: one task on each node, through srun, which passes signals on. Where Slurm asked to
# stop (the time limit is near), the job saves and ends, and is queued again: the same command goes
# on from the checkpoint. A job that fails by itself is not queued again.
run() {
  local status late
  say "$*"
  srun --ntasks-per-node=1 --kill-on-bad-exit=1 "$@" &
  step=$!
  while true; do
    status=0
    wait "$step" || status=$?
    kill -0 "$step" 2>/dev/null || break # the signal ended the wait, not the step
  done
  late=0 # where the step ended between the two, its own status is still to be had
  wait "$step" 2>/dev/null || late=$?
  [ "$late" -eq 127 ] || status=$late
  if [ -n "$stopped" ] && [ "$status" -ne 0 ]; then
    say "asked to stop; queued again, to go on from the last checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
  fi
  return "$status"
}
