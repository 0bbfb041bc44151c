#!/usr/bin/env bash
# The ensemble paper's pipeline on real instructions, at nano size: every stage once, from the rows to PPO against two
# reward models under a gold reward, best of n and DPO. The base has random weights and the gold is ROUGE-L with the
# row's own answer, so that the numbers say that the stages fit together, and nothing about instructions.
#
#   bash ensembles/real_instructions.sh [instructions.jsonl [folder of the tokenizer]]      (15 minutes of one core)
set -euo pipefail
for path; do # relative to where this was called
    [[ -z $path || $path == /* ]] || path=$PWD/$path
    shift && set -- "$@" "$path"
done
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."

rows=${1:-../shared/data/alpaca/instructions.jsonl}
tokenizer=${2:-../shared/data/tokenizer}
work=data/real_instructions
runs=runs/real_instructions
source quickstart/setup.sh requirements.txt
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
rm -rf "$work" "$runs"
mkdir -p "$work"

run() {
    echo "+ $*"
    "$@"
}

cp "$rows" "$work/rows.jsonl"
cat >"$work/gold.py" <<'PYTHON'
import json
from pathlib import Path

from rouge_score.rouge_scorer import RougeScorer

answers = {}
for row in map(json.loads, open(Path(__file__).with_name("rows.jsonl"))):
    prompt = row["instruction"] + ("\n" + row["input"] if row["input"] else "")
    answers[f"<|prompter|>{prompt}<|endoftext|><|assistant|>"] = row["output"]
scorer = RougeScorer(["rougeL"])


def score(post, summary):
    return scorer.score(answers[post], summary)["rougeL"].fmeasure
PYTHON
lengths=(--response-length 48)
batches=(--batch-size 16 --micro-batch-size 8)
run python quickstart/nano.py --tokenizer "$tokenizer" --size xs --output-dir "$work/nano-xs"
run python ensembles/alpaca_dataset.py --dataset "$rows" --base "$work/nano-xs" --max-query-length 128 \
    --max-response-length 48 --output-dir "$work/alpaca"
run python sft.py --model "$work/alpaca/base" --seed 1 --dataset "$work/alpaca/sft" --num-train-epochs 4 \
    --learning-rate 5e-3 "${batches[@]}" --output-dir "$runs/sft"
run python eval/samples.py "$runs/sft" "${lengths[@]}"
run python ensembles/gold_label.py --policy "$runs/sft" --gold "$work/gold.py:score" --dataset "$work/alpaca/pref" \
    --prompts 192 --label-noise 0.25 "${lengths[@]}" --output-dir "$work/labelled"
for seed in 1 2; do
    run python reward.py --model nano-xs --seed "$seed" --sft-model-path "$runs/sft" --dataset "$work/alpaca/sft" \
        --preference-dataset "$work/labelled/noise_25" --learning-rate 1e-3 "${batches[@]}" --run-eval \
        --output-dir "$runs/reward/$seed"
done
run python ensembles/best_of_n.py --policy "$runs/sft" --reward-model-paths "$runs/reward/1" "$runs/reward/2" \
    --gold "$work/gold.py:score" --dataset "$work/alpaca/sft" --prompts 16 --samples 64 "${lengths[@]}" \
    --output-dir "$runs/best_of_n"
run python ensembles/ppo.py --model nano-xs --seed 1 --sft-model-path "$runs/sft" --dataset "$work/alpaca/unlabeled" \
    --reward-model-paths "$runs/reward/1" "$runs/reward/2" --reward-combination uwo --uwo-lambda 0.1 \
    --eval-every 5 --eval-rows 64 --learning-rate 1e-4 --total-episodes 320 \
    --batch-size 32 --micro-batch-size 8 --sample-every 10 "${lengths[@]}" --output-dir "$runs/ppo"
run python eval/gold.py "$runs/ppo" --gold "$work/gold.py:score"
run python dpo.py --model nano-xs --seed 1 --sft-model-path "$runs/sft" \
    --preference-dataset "$work/labelled/noise_25" --learning-rate 2e-5 "${batches[@]}" --run-eval --output-dir "$runs/dpo"
run python eval/samples.py "$runs/dpo" --dataset "$work/alpaca/sft" "${lengths[@]}"
run cat "$runs/reward/1/eval/accuracy.csv" "$runs/best_of_n/best_of_n.md" "$runs/sft/eval/rouge.csv" "$runs/dpo/eval/rouge.csv"
