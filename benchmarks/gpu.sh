#!/usr/bin/env bash
# What the scripts do on a GPU: a report in markdown, $OUT/gpu.md, in eight minutes or less; nothing is downloaded.
#
#   bash benchmarks/gpu.sh        # where there is a GPU; who runs it commits the report as docs/gpu.md
#   bash benchmarks/gpu.sh cpu    # tiny sizes, without a GPU: whether this file and benchmarks/gpu.py still work
#
# What would begin after LIMIT seconds is left out, and the report names it. The scripts have the first 60 % of them,
# the figures of benchmarks/gpu.py the rest. The exit code is 1 if anything failed; OUT has its output.
set -uo pipefail
cd "$(dirname "$0")/.."
DEVICE=${1:-cuda} OUT=${OUT:-$PWD/gpu_check_out} LIMIT=${LIMIT:-450} PYTHON=${PYTHON:-python}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$OUT"
REPORT="$OUT/gpu.md" RUNS=$(mktemp -d) CODE=0
say() { echo "$*" | tee -a "$REPORT"; }

try() { # a name and a command, which becomes a line of the table
    local name=$1 began=$SECONDS code last
    shift
    if ((SECONDS > LIMIT * 6 / 10)); then
        say "| $name | left out | | |"
        return
    fi
    timeout 120 "$@" >"$OUT/last.log" 2>&1
    code=$?
    last=$(grep -v '^ *$' "$OUT/last.log" | tail -n 1 | tr '|' '/' | cut -c 1-80)
    say "| $name | $code | $((SECONDS - began)) | ${last//$RUNS/RUNS} |"
    ((code == 0)) || { CODE=1 && cp "$OUT/last.log" "$OUT/${name//[\/, ]/_}.log"; }
}

thrice() { # a script, what counts its work, how much, options: on the device, resumed there, and on the CPU
    local module=${1//\//.} count=--$2 n=$3 runs="$RUNS/${1##*/}"
    try "$1" "$PYTHON" -m "$module" "$count" "$n" --device "$DEVICE" --runs "$runs" "${@:4}"
    [ -d "$runs" ] || return
    try "$1, resumed there" "$PYTHON" -m "$module" --resume "$runs"/* "$count" $((2 * n))
    try "$1, resumed on the CPU" "$PYTHON" -m "$module" --resume "$runs"/* "$count" $((3 * n)) --device cpu
}

GAME="--env twenty-questions-subset --max-action-tokens 8 --eval-episodes 4"
ACTOR="--rollouts 8 --actor-updates 1 --actor-batch 4" CRITIC="--critic-updates 2 --critic-batch 4 --critic-pool 8"
APPS="--tasks 2 --rollouts 2 --min-advantage 0 --worlds 4 --finish-all 1 --eval-episodes 2 --world max_turns=4 --threads 1"
echo "# The scripts on $(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null || echo "a CPU")" >"$REPORT"
[ "$DEVICE" = cpu ] && say "Without a GPU, in tiny sizes: this shows that the check works, and nothing of a GPU."
say "$(date -u +%F), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)."
say $'\n'"| on $DEVICE | exit code | seconds | last line |"$'\n'"|---|---|---|---|"
thrice archer iterations 1 $GAME $ACTOR $CRITIC --warmup 0
thrice loop_ppo iterations 1 $APPS
thrice sft epochs 1 $GAME --model checkpoints/twenty-questions --demonstrations 32
try "archer, bfloat16" "$PYTHON" archer.py --iterations 1 --device "$DEVICE" --runs "$RUNS/bfloat16" --dtype bfloat16 \
    $GAME $ACTOR $CRITIC --warmup 0
try "loop_ppo, bfloat16, evaluation" "$PYTHON" loop_ppo.py --iterations 0 --device "$DEVICE" --runs "$RUNS/bfloat16" \
    $APPS --dtype bfloat16
thrice archer_offline_iql iterations 1 $GAME --dataset-size 32 --critic-updates 2 --actor-updates 2 --batch 4
thrice lge_drrn steps 8 --worlds 2 --step-limit 4 --log-every 4 --eval-every 8 --eval-episodes 2 --dev-episodes 0
thrice guide_simcse iterations 1 --encoder tiny --updates 2 --descriptions 4 --pairs 2 --threads 1
thrice baselines/chai iterations 1 $GAME --rollouts 8 $CRITIC
thrice baselines/filtered_bc iterations 1 $GAME $ACTOR
thrice baselines/ppo iterations 1 $GAME --rollouts 8 --epochs 1
try "tests marked gpu" "$PYTHON" -m pytest -q -n 0 -p no:cacheprovider -m gpu tests/algorithms

"$PYTHON" benchmarks/gpu.py --device "$DEVICE" --limit $((LIMIT - SECONDS)) 2>"$OUT/figures.log" |
    tee -a "$REPORT" || CODE=1
say $'\n'"$SECONDS seconds in all."
rm -rf "$RUNS" "$OUT/last.log"
exit $CODE
