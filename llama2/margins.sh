#!/usr/bin/env bash
# Llama 2's margins (tables 27 and 28) where the truth is known: the quickstart's comparisons (the first 8,000 of train),
# graded by the truth's gap between the two summaries, and reward models with no, small and large margins on four seeds
# each: once with the quickstart's labels, a quarter of which are wrong, and once with the truth's. Accuracy and score gap
# per grade are of validation pairs with the truth's labels.
#
#   bash llama2/margins.sh [noisy|true]...      (12 runs of size xs each, two side by side)
#
# It goes on where it was stopped, but not with runs of another commit.
set -euo pipefail
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."

(($#)) || set -- noisy true
for labels; do
    [[ $labels == noisy || $labels == true ]] || { echo "error: labels are noisy or true, not $labels" >&2 && exit 1; }
done
work=data/llama2_margins
runs=runs/llama2_margins
posts=data/quickstart/posts-1
bash quickstart/run.sh --data-only --posts-seed 1
source quickstart/setup.sh requirements.txt
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
python llama2/rounds.py one-commit --runs "$runs" --rows

for labels; do
    [[ -e $work/$labels ]] && continue
    rm -rf "$work/raw"
    mkdir -p "$work/raw"
    python - "$labels" "$posts/raw/comparisons" "$work/raw" <<'PYTHON'
import itertools
import json
import sys
from pathlib import Path

sys.path.insert(0, "quickstart")
from truth import score

labels, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
for split in ("train", "validation"):
    with open(source / f"{split}.jsonl") as rows, open(target / f"{split}.jsonl", "w") as out:
        for row in map(json.loads, itertools.islice(rows, 8000)):
            if row["info"]["article"]:
                continue  # CNN/DM
            first, second = (score(row["info"]["post"], summary["text"]) for summary in row["summaries"])
            if labels == "true" or split == "validation":
                row["choice"] = int(second > first)
            level = min(4, 1 + int(abs(second - first) / 0.3))  # as in posts.py, where half of train has none
            row["extra"]["confidence"] = 5 + level if row["choice"] else 5 - level
            out.write(json.dumps(row) + "\n")
PYTHON
    python llama2/preference_dataset.py --base quickstart/bases/nano-xs --max-query-length 512 --max-response-length 128 \
        --sources posts=tldr:"$work/raw/train.jsonl":train posts=tldr:"$work/raw/validation.jsonl":validation \
        --output-dir "$work/$labels"
done
[[ -e $runs/sft/model ]] || python sft.py --model quickstart/bases/nano-xs --seed 1 --dataset "$posts/tldr/sft" \
    --learning-rate 1e-3 --batch-size 32 --micro-batch-size 8 --resume --output-dir "$runs/sft"
mkdir -p "$runs/logs"
for labels; do
    for seed in 44413 55513 66613 77713; do
        for margin in none small large; do
            run=$labels/$margin/$seed
            [[ -e $runs/$run/eval/accuracy.csv ]] || echo "$runs/logs/${run//\//_}.log --output-dir $runs/$run" \
                "--seed $seed --margin $margin --preference-dataset $work/$labels/preference"
        done
    done
done | xargs -r -P 2 -L 1 bash -c 'echo "$0"; python llama2/reward.py "$@" --model nano-xs --run-eval --resume \
    --sft-model-path '"$runs/sft --dataset $posts/tldr/sft"' --learning-rate 1e-3 --batch-size 64 --micro-batch-size 16 \
    >"$0" 2>&1 || { tail -n 5 "$0"; exit 255; }'
python llama2/margins.py --runs "$runs"
