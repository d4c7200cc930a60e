# The environment that matters on a GPU machine, in one place: the sbatch files, the container and
# docs/cluster.md source this file. A variable that is set already keeps its value.
# EYRIE_ENVIRONMENT lists the names, for launchers that must be told what to carry to other nodes.

EYRIE_ENVIRONMENT=()

# set_default NAME VALUE
set_default() {
  export "$1=${!1:-$2}"
  EYRIE_ENVIRONMENT+=("$1")
}

# Libraries that compute on the CPU beside torch (BLAS of numpy, tokenizers' OpenMP) take every core
# by default, in each of eight ranks. torch itself is told its rank's share of the cores by Eyrie
# (engine.threads), whatever stands here; torchrun would set 1, too, and warn.
set_default OMP_NUM_THREADS 1

# Packs differ in length from step to step. Segments of fixed size then leave holes that no later
# pack fits, and a job ends without memory after hours; segments that grow leave none.
set_default PYTORCH_ALLOC_CONF expandable_segments:True

# By default NCCL ends with "unhandled system error" and no more. WARN names the cause (a full
# /dev/shm, a link that is down, another NCCL on another node) and says nothing in a healthy run.
set_default NCCL_DEBUG WARN

# After SIGTERM torchrun grants its ranks 30 s and then kills them. The step under way and a
# checkpoint onto a shared disk take longer; Slurm warns 300 s ahead (launch/slurm/*.sbatch).
set_default TORCH_ELASTIC_SHUTDOWN_TIMEOUT 240

# What torch.compile, Triton and DeepSpeed build goes to the node's own disk: a home folder that all
# nodes share is slow to lock, and a build killed half-way leaves a lock that later jobs wait for.
EYRIE_BUILDS=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/eyrie-builds-$(id -u)
set_default TORCH_EXTENSIONS_DIR "$EYRIE_BUILDS/extensions"
set_default TRITON_CACHE_DIR "$EYRIE_BUILDS/triton"
set_default TORCHINDUCTOR_CACHE_DIR "$EYRIE_BUILDS/inductor"

# Not set, because only the site knows: NCCL_SOCKET_IFNAME (the interface for the first contact,
# where NCCL picks one that does not reach the other nodes), NCCL_IB_HCA (the InfiniBand ports for
# data). NCCL_IB_DISABLE, NCCL_P2P_DISABLE and NCCL_SHM_DISABLE find a fault and cost the speed:
# set one for a trial, never for good.
