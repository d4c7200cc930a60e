#!/usr/bin/env bash
# Optional: proves an exported head in llama.cpp. Converts verifier and head to GGUF, builds two of its
# examples, and compares the greedy text with and without the head. Exit 1 where they differ.
#   LLAMA_CPP=/path/to/llama.cpp bash launch/llamacpp.sh VERIFIER_FOLDER HEAD_FOLDER [WORK_FOLDER]
# HEAD_FOLDER comes from  python -m launch.export HEAD --to llamacpp --dtype float32 . Needs cmake, a C++
# compiler and a Python with torch, transformers, sentencepiece and protobuf (PYTHON=...).
set -euo pipefail

usage() {
  sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
}

[ $# -ge 2 ] && [ -n "${LLAMA_CPP:-}" ] || usage
verifier=$1 head=$2 work=${3:-llamacpp}
for file in "$LLAMA_CPP/convert_hf_to_gguf.py" "$verifier/config.json" "$head/config.json"; do
  if [ ! -f "$file" ]; then
    echo "$file: no such file; give LLAMA_CPP, the verifier's folder and an exported head" >&2
    exit 2
  fi
done
mkdir -p "$work"
PYTHON=${PYTHON:-python3}
TOKENS=64
PROMPTS=(
  "Write a short Python function that adds two numbers."
  "List three animals that live in the sea."
  "The capital of France is"
)

# convert OUTPUT ARGUMENTS...: one GGUF in float32, kept for the next time.
convert() {
  local output=$1
  shift
  [ -f "$output" ] && return
  PYTHONPATH="$LLAMA_CPP/gguf-py" "$PYTHON" "$LLAMA_CPP/convert_hf_to_gguf.py" "$@" \
    --outtype f32 --outfile "$output.part" >"$work/convert.log" 2>&1 ||
    { tail -n 3 "$work/convert.log" >&2; exit 2; }
  mv "$output.part" "$output"
}

# run NAME PROGRAM ARGUMENTS...: what it prints is the prompt and the greedy continuation.
run() {
  local name=$1 program=$2
  shift 2
  "$LLAMA_CPP/build/bin/$program" -m "$work/verifier.gguf" -n "$TOKENS" "$@" \
    >"$work/$name.txt" 2>"$work/$name.log" || { tail -n 3 "$work/$name.log" >&2; exit 2; }
}

echo "converting verifier and head to GGUF"
convert "$work/verifier.gguf" "$verifier"
convert "$work/head.gguf" "$head" --target-model-dir "$verifier"
if [ ! -x "$LLAMA_CPP/build/bin/llama-speculative-simple" ]; then
  echo "building llama.cpp, log in $work/build.log"
  cmake -S "$LLAMA_CPP" -B "$LLAMA_CPP/build" -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_CURL=OFF >"$work/build.log"
  cmake --build "$LLAMA_CPP/build" -j --target llama-speculative-simple llama-simple >>"$work/build.log"
fi

differing=0
for prompt in "${PROMPTS[@]}"; do
  run plain llama-simple "$prompt"
  run head llama-speculative-simple -md "$work/head.gguf" --spec-type draft-eagle3 \
    --spec-draft-n-max 3 --temp 0 -c 1024 -p "$prompt"
  accepted=$(sed -n 's/.* accept *= *//p' "$work/head.log")
  # The last round may overrun the limit: the shorter text must begin the longer one.
  if "$PYTHON" - "$work/plain.txt" "$work/head.txt" <<'COMPARE'; then
import sys
plain, head = (open(path, encoding="utf-8").read().strip() for path in sys.argv[1:])
sys.exit(not plain or not head or not (head.startswith(plain) or plain.startswith(head)))
COMPARE
    echo "same text, accepted ${accepted:-none}: $prompt"
  else
    echo "DIFFERENT text: $prompt ($work/plain.txt, $work/head.txt)"
    differing=$((differing + 1))
    cp "$work/plain.txt" "$work/plain.$differing.txt"
    cp "$work/head.txt" "$work/head.$differing.txt"
  fi
done
echo "${#PROMPTS[@]} prompts, $differing with another text"
[ "$differing" -eq 0 ]
