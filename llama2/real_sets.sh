#!/usr/bin/env bash
# Two reward models as in Llama 2 on real preference sets, at nano size: a mixture for each, their statistics (table 6),
# a base that is trained a little on the chosen responses, a helpfulness and a safety model from it, and their accuracy
# per source and grade on the validation pairs of all sources. The base has random weights and, besides its embeddings,
# a tenth of a million parameters: the numbers say what so little learns of these sets, and that everything fits together.
#
#   bash llama2/real_sets.sh [folder of the sets] [output folder]      (about a quarter of an hour on two cores)
set -euo pipefail
for path; do # relative to where this was called
    [[ -z $path || $path == /* ]] || path=$PWD/$path
    shift && set -- "$@" "$path"
done
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."

sets=${1:-../shared/data}
output=${2:-llama2/results/real_sets}
work=data/llama2_real
runs=runs/llama2_real
source quickstart/setup.sh requirements.txt
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
rm -rf "$work" "$runs"
mkdir -p "$work" "$output"

run() {
    echo "+ $*"
    "$@"
}

sources=(posts=tldr:"$sets"/tldr_comparisons/train.jsonl:train posts=tldr:"$sets"/tldr_comparisons/validation.jsonl:validation
    posts=tldr:"$sets"/preferences/openai_comparison_example.jsonl:train
    levels=five_levels:"$sets"/preferences/graded_five_levels.jsonl strength=strength:"$sets"/preferences/strength_0_to_3.json
    harmless=hh:"$sets"/preferences/hh_harmless_base_test.jsonl.gz:safety)
dataset=(python llama2/preference_dataset.py --bad-rows skip --validation-share 0.1 --sources "${sources[@]}")
run python quickstart/nano.py --tokenizer "$sets/tokenizer" --size xs --output-dir "$work/nano-xs"
run "${dataset[@]}" --base "$work/nano-xs" --output-dir "$work/all"
# after section 3.2.2 of the report: as much of everything else as of one's own; a tenth of helpfulness beside safety
run "${dataset[@]}" --base "$work/all/base" --output-dir "$work/helpfulness" \
    --mix levels=1/2 posts=1/4 strength=1/25 harmless=21/100
run "${dataset[@]}" --base "$work/all/base" --output-dir "$work/safety" \
    --mix harmless=9/10 posts=5/100 levels=4/100 strength=1/100
# one's own set alone, without the open ones
run python llama2/preference_dataset.py --bad-rows skip --validation-share 0.1 --base "$work/all/base" \
    --output-dir "$work/alone" --sources levels=five_levels:"$sets"/preferences/graded_five_levels.jsonl
run python sft.py --model "$work/all/base" --seed 1 --dataset "$work/all/sft" --total-episodes 640 --learning-rate 3e-3 \
    --batch-size 32 --micro-batch-size 8 --output-dir "$runs/sft"
cp "$work/all/statistics/"{table_6.csv,counts.csv,grades.csv} "$output"
for kind in helpfulness alone safety; do
    margin=$([[ $kind == safety ]] && echo none || echo small)
    run python llama2/reward.py --model nano-xs --seed 1 --sft-model-path "$runs/sft" --dataset "$work/all/sft" \
        --preference-dataset "$work/$kind/preference" --margin "$margin" --num-train-epochs 3 --learning-rate 1e-3 \
        --batch-size 16 --micro-batch-size 8 --run-eval --output-dir "$runs/$kind"
    cp "$runs/$kind/eval/accuracy.csv" "$output/accuracy_$kind.csv"
    cp "$work/$kind/statistics/counts.csv" "$output/counts_$kind.csv"
done
run python ensembles/ppo.py --model nano-xs --seed 1 --sft-model-path "$runs/sft" --dataset "$work/all/sft" \
    --reward-model-paths "$runs/helpfulness" "$runs/safety" --reward-combination safety_gate \
    --value-start reward --no-standardise-members --penalty-reward-value None --response-length 48 \
    --learning-rate 1e-4 --total-episodes 160 --batch-size 32 --micro-batch-size 8 --sample-every 0 --output-dir "$runs/ppo"
run cat "$output/table_6.csv" "$output"/accuracy_{helpfulness,alone,safety}.csv
