#!/usr/bin/env bash
# The whole job on the demo's verifier and prompts: environment, answers, states, training,
# measurement, export. Arguments are overrides: bash launch/demo.sh run.name=mine ttt.depth=5
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

root=runs name=demo
for override in "$@"; do
  case $override in
    run.root=*) root=${override#*=} ;;
    run.name=*) name=${override#*=} ;;
  esac
done

setup
note "Running the job: torchrun --standalone --nproc-per-node=1 train/main.py $*"
torchrun --standalone --nproc-per-node=1 train/main.py "$@"
note "Finished after $((SECONDS / 60)) min $((SECONDS % 60)) s, set-up included"
report=$root/$name/eval/report.md
if [ -f "$report" ]; then # stages=[...] may leave evaluation out
  note "Report: $report"
fi
