#!/usr/bin/env bash
# Makes the environments of the trainers that step.py and acceptance_*.py beside it run. 2 minutes.
#   bash tests/bench/peer_envs.sh [DIR]        DIR: where they go; default .bench in the checkout
set -u
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$HERE/../../launch/setup.sh"

mkdir -p "${1:-$ROOT/.bench}" || exit 1
TARGET=$(cd "${1:-$ROOT/.bench}" && pwd)

# install_peer PYTHON NAME MODULES: its pinned list and nothing else, then what the step imports.
install_peer() {
  local python=$1 name=$2 modules=$3 pins=$HERE/requirements-$2.txt
  install_cpu_torch "$python" "$pins" &&
    step "Installing $name (tests/bench/requirements-$name.txt)" \
      pip_install "$python" "$pins" --no-deps -r "$pins" &&
    step "Importing $name" "$python" -c "import $modules"
}

install_specforge() {
  install_peer "$1" specforge "specforge.algorithms.eagle3.model, specforge.training.strategies.base"
}

install_speculators() {
  install_peer "$1" speculators "speculators.models.eagle3.core, speculators.train.data"
}

failed=0
for peer in specforge speculators; do
  environment "$TARGET/$peer" "$(cksum <"$HERE/requirements-$peer.txt")" "install_$peer" || failed=1
done
exit "$failed"
