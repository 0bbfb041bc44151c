#!/usr/bin/env bash
# "Reward Model Ensembles Help Mitigate Overoptimization" at its scale: tables 1 to 4, best of n, and PPO against the mean,
# the worst case and the uncertainty-weighted score of five reward models and against each of them alone. PPO against the
# average of their weights (WARM) is added.
#
#   bash ensembles/run.sh --dry-run     prints the commands
#   bash ensembles/run.sh               runs them, one after another
#
# The environment replaces the paper's values of PROXY, NOISE (percent of flipped labels), and of PPO SEEDS (figure 4 has
# three) and KL. Folders are named after them. What is finished is kept, and what was stopped continues, so a call with
# other values adds to the runs. It also replaces POLICY, GOLD and DATA, which are the same for all runs of a folder: other
# values need another RUNS. And it replaces LAUNCH. To draw the runs:
#
#   python ensembles/figures.py --runs runs/ensembles/ppo/noise_25_pythia-70m runs/ensembles/best_of_n/noise_25_pythia-70m
#
# What you should know:
# - The paper's reward models learn from answers to 46,000 prompts (section 4.3; it does not say which of the 52,000). Here
#   they learn from AlpacaFarm's 10,000 for that purpose, which neither SFT, PPO nor best of n sees.
# - GOLD must exist before, with the policy's tokenizer and its two turns. AlpacaFarm's of 7B is a LLaMA and does not fit.
# - What the released code sets beyond the paper's tables is set here where a script has a flag for it; README.md lists the
#   rest. A warm-up of 50 steps is 0.035 of about 1,400.
# - 3,000 PPO steps of 32 are 94 updates, because 256 rollouts in 4 epochs are 32 steps.
# - --eval-every and --eval-rows are ours. All else is ensembles/ppo.py's default: the value model starts from SFT, as in the
#   paper's code, and members are standardised, as its authors say they did.
# - An answer without EOS keeps its score. Detail 23's fixed -1 is not in this paper, and would be a reward wherever the
#   worst case falls below -1.
set -euo pipefail
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."

policy=${POLICY:-EleutherAI/pythia-1.4b}
proxy=${PROXY:-EleutherAI/pythia-70m} # 44M without its embeddings of the output
gold=${GOLD:-runs/ensembles/gold}
data=${DATA:-data/alpaca}
launch=(${LAUNCH:-accelerate launch --config_file benchmark/accelerate/zero2.yaml --num_processes 4})
[[ $# == 0 || $* == --dry-run ]] || { echo "error: $*: run.sh takes --dry-run or nothing" >&2 && exit 1; }
dry_run=${1:-}

runs=${RUNS:-runs/ensembles}
settings="POLICY=$policy GOLD=$gold DATA=$data"
if [[ -z $dry_run ]]; then
    if [[ -e $runs/settings && $(<"$runs/settings") != "$settings" ]]; then
        echo "error: $runs has runs of $(<"$runs/settings"), not of $settings: choose another folder with RUNS" >&2 && exit 1
    fi
    mkdir -p "$runs"
    echo "$settings" >"$runs/settings"
fi

run() { # what it leaves behind, command...
    if [[ -z $dry_run && -e $1 ]]; then
        echo "keeping $1, which is finished"
        return
    fi
    echo "${*:2}"
    [[ -n $dry_run ]] || "${@:2}"
}

setting=noise_${NOISE:-25}_${proxy##*/}
go_on=(--resume --save-every 200)
for model in "$policy" "$proxy"; do # their tokens are the same: the policy's data serve both
    name=${model##*/}
    run "$data/$name/sft" python ensembles/alpaca_dataset.py --base "$model" --output-dir "$data/$name"
    base=$data/$name/base
    [[ -n $dry_run || -e $base ]] || base=$model # it has the two turns
    run "$runs/sft/$name/model" "${launch[@]}" sft.py --model "$base" --seed 1 \
        --dataset "$data/${policy##*/}/sft" --learning-rate 8e-6 --num-train-epochs 3 --batch-size 4 \
        --loss-on response --max-grad-norm 2 \
        "${go_on[@]}" --output-dir "$runs/sft/$name" # table 1
done
policy_run=$runs/sft/${policy##*/}
data=$data/${policy##*/}
run "$runs/labelled" python ensembles/gold_label.py --policy "$policy_run" --gold "$gold" --dataset "$data/pref" \
    --label-noise 0 0.25 0.35 --response-length 256 --output-dir "$runs/labelled" # table 4

members=()
for seed in 1 2 3 4 5; do # table 2: the same data, another head and another order
    member=$runs/reward/$setting/$seed
    run "$member/model" "${launch[@]}" llama2/reward.py --model "$proxy" --seed "$seed" \
        --sft-model-path "$runs/sft/${proxy##*/}" --dataset "$data/sft" \
        --preference-dataset "$runs/labelled/noise_${NOISE:-25}" --learning-rate 1e-5 --num-train-epochs 5 \
        --batch-size 32 --warmup-share 0.035 --max-grad-norm 2 --score-l2 0.001 --run-eval "${go_on[@]}" --output-dir "$member"
    members+=("$member")
done
average=$runs/reward/$setting/average
run "$average/args.json" python ensembles/average.py --reward-model-paths "${members[@]}" \
    --preference-dataset "$runs/labelled/noise_${NOISE:-25}" --output-dir "$average"
run "$runs/best_of_n/$setting/best_of_n.md" python ensembles/best_of_n.py --policy "$policy_run" \
    --reward-model-paths "${members[@]}" --gold "$gold" --dataset "$data/sft" --prompts 1000 --samples 12500 \
    --response-length 256 --output-dir "$runs/best_of_n/$setting"

ppo() { # folder, kl, seed, flags...: table 3
    local folder=$runs/ppo/$setting/$1_kl_$2/$3
    run "$folder/model" "${launch[@]}" ensembles/ppo.py --model "$policy" --seed "$3" --sft-model-path "$policy_run" \
        --dataset "$data/unlabeled" --learning-rate 1e-6 --lr-schedule cosine --final-learning-rate 1e-7 \
        --lr-schedule-length 3.3333333333333335 --num-ppo-epochs 4 --vf-coef 1 --eval-temperature 0.7 \
        --batch-size 256 --num-mini-batches 8 --total-episodes 24064 --cliprange 0.2 --cliprange-value 0.2 --lam 0.95 \
        --temperature 1.0 --response-length 256 --kl-coef "$2" --penalty-reward-value None \
        --eval-every 3 --eval-rows 256 --resume --save-every 10 \
        --output-dir "$folder" "${@:4}"
}

for seed in ${SEEDS:-1}; do
    for kl in ${KL:-0 0.01 0.1 0.2}; do # figures 4 and 5, and the 0.2 that a single reward model needs (section 5.2)
        ppo mean "$kl" "$seed" --reward-model-paths "${members[@]}" --reward-combination mean
        ppo wco "$kl" "$seed" --reward-model-paths "${members[@]}" --reward-combination wco
        ppo uwo "$kl" "$seed" --reward-model-paths "${members[@]}" --reward-combination uwo --uwo-lambda 0.1
        ppo warm "$kl" "$seed" --reward-model-paths "$average"
        for member in "${members[@]}"; do
            ppo "single_${member##*/}" "$kl" "$seed" --reward-model-paths "$member"
        done
    done
done
run "" python eval/gold.py "$runs/ppo/$setting" --gold "$gold"
