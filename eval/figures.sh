#!/usr/bin/env bash
# Judges the samples of a study's runs, reports on its reward models, shows its tokens and draws the paper's figures:
#
#   JUDGE=gpt-3.5-turbo bash eval/figures.sh        # runs/, the paper's sizes and seeds
#   MODELS="nano-xs nano-s nano-m" RUNS=runs/quickstart/posts-1 DATA=data/quickstart/posts-1/tldr \
#       BASE=quickstart/bases/nano-m JUDGE=quickstart/truth.py:score OUTPUT=quickstart/results/nano bash eval/figures.sh
#
# BASE is the pre-trained model of the last of MODELS, and BASE_URL the address of the judge's endpoint. Answers are
# kept, so the same command continues.
set -euo pipefail
tools=$(dirname "${BASH_SOURCE[0]}")
set -f # words are split at blanks and line ends, and never taken for file names
models=(${MODELS:-1b 2.8b 6.9b})
seeds=(${SEEDS:-44413 55513 66613 77713})
set +f
shopt -s nullglob
last=${models[${#models[@]} - 1]}
runs=${RUNS:-runs} data=${DATA:-data/tldr} base=${BASE:-EleutherAI/pythia-$last-deduped} output=${OUTPUT:-runs/figures}
judge=${JUDGE:?set JUDGE to what judge.py takes as --judge}
study=(--models "${models[@]}" --seeds "${seeds[@]}" --runs "$runs")

files=()
for model in "${models[@]}"; do
    for seed in "${seeds[@]}"; do
        files+=("$runs"/{sft,dpo,ppo,ppo_whiten}/"$model/$seed"/eval/samples_validation.cs[v])
    done
done
pairs=$runs/pairs_validation.csv
python "$tools/rm_report.py" --preference-dataset "$data/preference" --write-pairs "$pairs"
python "$tools/judge.py" ${files[@]+"${files[@]}"} "$pairs" --judge "$judge" ${BASE_URL:+--base-url "$BASE_URL"}
judged=$runs/judge_$(sed -E 's/[^A-Za-z0-9.-]+/-/g' <<< "$judge")_of_pairs_validation.csv
python "$tools/rm_report.py" "${study[@]}" --preference-dataset "$data/preference" --judged "$judged" \
    --output "$output/rm_report"

run=$last/${seeds[0]}
shown=(--sft "$runs/sft/$run" --ppo "$runs/ppo/$run" --reward-model "$runs/reward/$run")
if [[ -d $runs/dpo/$run ]]; then shown+=(--dpo "$runs/dpo/$run"); fi
python "$tools/visualize_tokens.py" --base "$base" --dataset "$data/sft" "${shown[@]}" --output "$output/tokens"
python "$tools/figures.py" "${study[@]}" --judge "$judge" --output-dir "$output"
