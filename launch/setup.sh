# Makes the environments. Sourced by demo.sh, test.sh and vllm_env.sh; defines functions only.
# Written for bash 3.2 and later; ROOT is the checkout.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TORCH=2.13.0
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

note() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }

# The newest line of a log, without the warnings that pip repeats for every package.
last_line() { grep -v -e '^WARNING' -e '^[[:space:]]*$' "$1" | tail -n 1 | cut -c 1-90; }

# step TEXT COMMAND...: run the command with its output in $LOG, and say every 15 s how far it is.
step() {
  local text=$1 start=$SECONDS spoken=$SECONDS pid status=0
  shift
  note "$text"
  "$@" >>"$LOG" 2>&1 </dev/null &
  pid=$!
  trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.3
    if [ $((SECONDS - spoken)) -ge 15 ]; then
      spoken=$SECONDS
      note "  $((SECONDS - start)) s: $(last_line "$LOG")"
    fi
  done
  wait "$pid" || status=$?
  trap - INT TERM
  [ "$status" -ne 0 ] || note "  done in $((SECONDS - start)) s"
  return "$status"
}

# Prints the first Python that will do: $PYTHON if it is set, else 3.11 or later from the path.
find_python() {
  local candidate found=""
  for candidate in ${PYTHON:-python3.11 python3.12 python3 python3.13 python3.14 python}; do
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
    if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
      echo "$candidate"
      return 0
    fi
    found=$candidate
  done
  if [ -n "$found" ]; then
    echo "$found cannot make environments: its modules venv and ensurepip are missing" \
      "(Debian and Ubuntu: apt-get install python3-venv)." >&2
  else
    echo "No Python 3.11 or later was found${PYTHON:+ at PYTHON=$PYTHON}: install it, or name" \
      "it with PYTHON=/path/to/python3.11." >&2
  fi
  return 1
}

has_nvidia_driver() { nvidia-smi -L >/dev/null 2>&1 || [ -e /proc/driver/nvidia/version ]; }

# Whether PyTorch's CPU index answers within five seconds, name look-up included.
reach_cpu_index() {
  "$1" - "$TORCH_CPU_INDEX/torch/" 2>/dev/null <<'PYTHON'
import os, sys, threading, urllib.request
answers = []
ask = lambda: answers.append(urllib.request.urlopen(sys.argv[1], timeout=5).status)
thread = threading.Thread(target=ask, daemon=True)
thread.start()
thread.join(5)
os._exit(0 if answers else 1)
PYTHON
}

# install_torch PYTHON PINS: torch comes first, so that nothing after it chooses another build.
install_torch() {
  if has_nvidia_driver; then
    step "Installing torch $TORCH with CUDA (NVIDIA driver found)" pip_install "$@" "torch==$TORCH"
  elif [ "$(uname)" = Darwin ]; then
    step "Installing torch $TORCH" pip_install "$@" "torch==$TORCH"
  else
    install_cpu_torch "$@"
  fi
}

# install_cpu_torch PYTHON PINS: from what pip sees, else from PyTorch's CPU index, else the plain one.
install_cpu_torch() {
  step "Installing torch $TORCH for CPU" pip_install "$@" "torch==$TORCH+cpu" && return
  note "  pip sees no CPU build; asking $TORCH_CPU_INDEX"
  if reach_cpu_index "$1"; then
    step "Installing torch $TORCH for CPU from there" \
      pip_install "$@" "torch==$TORCH+cpu" --extra-index-url "$TORCH_CPU_INDEX" && return
  fi
  note "WARNING: PyTorch's CPU index cannot be used from here"
  step "Installing the plain torch $TORCH, which brings some GB of CUDA libraries" \
    pip_install "$@" "torch==$TORCH"
}

# pip_install PYTHON PINS ARGUMENTS...: for step alone, whose background shell it replaces, so that
# an interrupt reaches pip. Python compiles what it imports; pip need not compile everything.
pip_install() {
  local python=$1 pins=$2
  shift 2
  exec "$python" -m pip install --disable-pip-version-check --no-compile \
    --progress-bar off -c "$pins" "$@"
}

# The environment can be used here: its Python runs, and it was made at this very place.
usable() { "$1/bin/python" -c '' 2>/dev/null && grep -qF -- "-m venv $1" "$1/pyvenv.cfg"; }

# environment DIR STAMP INSTALL: reuse DIR when it bears STAMP; else make it, or bring it up to date.
# INSTALL PYTHON is the function that fills it. An installation that was interrupted is done anew:
# pip takes half a package for a whole one.
environment() {
  local dir=$1 stamp=$2 install=$3 start=$SECONDS python
  if command -v flock >/dev/null; then # two set-ups in one checkout take turns
    exec 9>"$dir.lock"
    flock -n 9 || { note "Another set-up is at work here; waiting" && flock 9; }
  fi
  if [ "$(cat "$dir/.stamp" 2>/dev/null)" = "$stamp" ] && usable "$dir"; then
    note "Environment ${dir##*/}: up to date"
    return
  fi
  if [ -e "$dir" ] && { [ -e "$dir/.installing" ] || ! usable "$dir"; }; then
    note "Environment ${dir##*/}: interrupted or moved; making it anew"
    rm -rf "$dir"
  fi
  LOG=$dir/setup.log
  if [ ! -e "$dir" ]; then
    python=$(find_python) || return 1
    mkdir "$dir"
    touch "$dir/.installing"
    step "Environment ${dir##*/}: creating with $("$python" --version)" \
      "$python" -m venv "$dir" || fail || return 1
  fi
  rm -f "$dir/.stamp"
  touch "$dir/.installing"
  "$install" "$dir/bin/python" || fail || return 1
  echo "$stamp" >"$dir/.stamp"
  rm "$dir/.installing"
  note "Environment ${dir##*/}: ready after $((SECONDS - start)) s"
}

# Says why the last step failed; the whole log stays beside the environment until the next try.
fail() {
  grep -v '^WARNING' "$LOG" | tail -n 20 >&2
  note "FAILED: $(grep '^ERROR' "$LOG" | tail -n 1) (log: $LOG)"
  return 1
}

install_eyrie() {
  local pins=$ROOT/launch/constraints.txt
  install_torch "$1" "$pins" || return 1
  # DeepSpeed is a source distribution. Its isolated build sees no torch, so it compiles nothing
  # and downloads no second one, as long as no operators are asked for.
  export DS_BUILD_OPS=0
  step "Installing Eyrie and what it needs (launch/constraints.txt)" \
    pip_install "$1" "$pins" -e "$ROOT[dev,sweep]"
}

# setup: .venv holds what pyproject.toml and launch/constraints.txt say, and leads the path.
setup() {
  cd "$ROOT" || return 1
  environment "$ROOT/.venv" "$(cat pyproject.toml launch/constraints.txt | cksum)" \
    install_eyrie || return 1
  exec 9>&- # the job holds no lock
  export PATH="$ROOT/.venv/bin:$PATH" VIRTUAL_ENV="$ROOT/.venv"
  has_nvidia_driver || export DS_ACCELERATOR=cpu
}
