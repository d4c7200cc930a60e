#!/usr/bin/env bash
# All checks: format, types, import direction, tests, and an exported head in real vLLM.
#   bash launch/test.sh [--all] [arguments for pytest, -m apart]      --all runs the slow tests too
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

speed="not slow and "
if [ "${1:-}" = --all ]; then
  speed=""
  shift
fi

setup || exit 1
log=$(mktemp)
vllm_log=$(mktemp)
bash launch/vllm_env.sh >"$vllm_log" 2>&1 </dev/null & # downloads while the first tests compute
vllm_setup=$!
trap 'rm -f "$log" "$vllm_log"' EXIT
trap 'kill "$vllm_setup" 2>/dev/null; exit 130' INT TERM

results=()
failed=0

# check NAME COMMAND...: run it, and keep its outcome and time for the summary.
check() {
  local name=$1 start=$SECONDS outcome=passed status=0
  shift
  note "$name"
  "$@" || status=$?
  if [ "$status" -ne 0 ]; then
    outcome=FAILED
    failed=1
  fi
  results+=("$(printf '%-8s %5d s  %s' "$outcome" $((SECONDS - start)) "$name")")
}

# tests EXPRESSION ARGUMENTS...: pytest over what the marker expression selects; nothing is no fault.
tests() {
  local expression=$1 status=0
  shift
  pytest -m "$expression" -q -rs --durations=5 "$@" 2>&1 | tee -a "$log" || status=$?
  [ "$status" -eq 5 ] || return "$status"
}

check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "basedpyright" basedpyright
check "import contracts" lint-imports
# a file stays on one worker: its fixtures are made once
check "pytest" tests "${speed}not vllm" -n 2 --dist loadfile "$@"

note "Waiting for the vLLM environment (made meanwhile)"
if ! wait "$vllm_setup"; then
  EYRIE_NO_VLLM="the vLLM environment cannot be made: $(tail -n 1 "$vllm_log")"
  export EYRIE_NO_VLLM
fi
sed 's/^/  vLLM: /' "$vllm_log"
check "pytest with real vLLM" tests "${speed}vllm" "$@"

# count WORD: how many tests the closing lines of pytest give that outcome.
count() {
  grep -E ' in [0-9.]+s( \([0-9:]+\))?$' "$log" | grep -oE "[0-9]+ $1" | awk '{n += $1} END {print n + 0}'
}

printf '\nSummary after %d min %d s\n' $((SECONDS / 60)) $((SECONDS % 60))
printf '  %s\n' "${results[@]}"
if grep -q '^SKIPPED' "$log"; then
  echo "  Skipped:"
  grep '^SKIPPED' "$log" | sed 's/^SKIPPED/   /'
fi
echo "Tests: $(count passed) passed, $(($(count failed) + $(count error))) failed, $(count skipped) skipped"
exit "$failed"
