#!/usr/bin/env bash
# The whole pipeline on a laptop, without a GPU, any data or the Hub: generated posts, a nano model, four stages.
#
#   bash quickstart/run.sh [size] [seed]        size: xs (default), s or m; seed of the stages: 1 by default
#
# Data and nano model are made once, in data/quickstart/; the runs land in runs/{stage}/nano-{size}/{seed}.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

size=${1:-xs}
seed=${2:-1}
if [[ ! "$size" =~ ^(xs|s|m)$ || ! "$seed" =~ ^(0|[1-9][0-9]*)$ || $# -gt 2 ]]; then
    echo "error: usage: bash quickstart/run.sh [xs|s|m] [seed]" >&2
    exit 1
fi
model=nano-$size
data=data/quickstart

# ---- environment ----------------------------------------------------------------------------------------------------
source quickstart/setup.sh requirements.txt
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)}

step() { # print a command with the time so far, then run it
    printf '\n[%3d s] %s\n' "$SECONDS" "$*"
    "$@"
}

# ---- data and model: each made once ---------------------------------------------------------------------------------
[[ -e $data/raw ]] || step python quickstart/posts.py --output-dir $data/raw --seed 1
[[ -e $data/tldr ]] || step python tldr_dataset.py --sft-dataset $data/raw/posts \
    --preference-dataset $data/raw/comparisons --tokenizer $data/raw/tokenizer --output-dir $data/tldr
[[ -e $data/$model ]] || step python quickstart/nano.py --tokenizer $data/raw/tokenizer --size "$size" \
    --output-dir "$data/$model" --seed 1

# ---- stages: a run folder from before is removed, as the stages never overwrite one ---------------------------------
for stage in sft reward ppo dpo; do
    run=runs/$stage/$model/$seed
    if [[ -e $run ]]; then
        echo "removing $run of an earlier quickstart (to keep it, give another seed: bash quickstart/run.sh $size $((seed + 1)))"
        rm -r "$run"
    fi
done

sft_data=$data/tldr/sft
preference_data=$data/tldr/preference
step python sft.py --model "$data/$model" --seed "$seed" --dataset $sft_data \
    --learning-rate 3e-3 --batch-size 32 --micro-batch-size 32 --num-train-epochs 4 --run-eval
step python reward.py --model "$data/$model" --seed "$seed" --dataset $sft_data --preference-dataset $preference_data \
    --learning-rate 1e-3 --batch-size 32 --micro-batch-size 32 --num-train-epochs 2 --run-eval
step python ppo.py --model "$data/$model" --seed "$seed" --dataset $sft_data \
    --learning-rate 1e-4 --batch-size 64 --micro-batch-size 64 --total-episodes 3840 --run-eval
step python dpo.py --model "$data/$model" --seed "$seed" --dataset $sft_data --preference-dataset $preference_data \
    --learning-rate 1e-4 --batch-size 32 --micro-batch-size 32 --run-eval

# ---- results --------------------------------------------------------------------------------------------------------
printf '\n[%3d s] done\n' "$SECONDS"
python - "$model" "$seed" <<'PYTHON'
import json
import sys
from pathlib import Path

for stage in ("sft", "reward", "ppo", "dpo"):
    run = Path("runs", stage, *sys.argv[1:])
    lines = (run / "metrics.jsonl").read_text().splitlines()
    last = {key: value for key, value in json.loads(lines[-1]).items() if not key.startswith("time/")}
    print(f"\n{run}: {len(lines)} lines of metrics, the last one:")
    for key, value in last.items():
        print(f"    {key:48} {value:.4g}" if isinstance(value, float) else f"    {key:48} {value}")
    for table in sorted((run / "eval").glob("*.csv")):
        print(f"    table {table}")
PYTHON
