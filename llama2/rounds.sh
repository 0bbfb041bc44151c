#!/usr/bin/env bash
# Llama 2's loop (section 3.2.1) where the truth is known: in each of five rounds the newest policy and the one before it
# answer 800 new prompts at two temperatures, the truth grades 320 pairs (a quarter of the labels are flipped), a reward
# model learns from all pairs so far with margins, and PPO starts from the SFT policy against it. Arms:
#
#   graded     the rounds
#   plain      the rounds without margins
#   once       as many labels (1,600), all of pairs by the SFT policy: one reward model, one PPO
#   ensemble   once's pairs, five reward models and their mean
#
#   bash llama2/rounds.sh [--seeds "1 2 3 4"] [arm]...      size s, all arms: about an hour and a half of one core a seed
#   bash llama2/rounds.sh --fast                            one seed, size xs, two rounds of 400 prompts and 480 episodes,
#                                                           graded and once: about eight minutes
#
# It goes on where it was stopped, and an arm whose last row is in the results is not made again; but --fast, once
# finished, starts anew.
set -euo pipefail
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."

size=s seeds="1 2 3 4" rounds=5 prompts=800 labels=320 episodes=1920 output=llama2/results runs=runs/llama2_rounds arms=()
while (($#)); do
    case $1 in
        --fast)
            size=xs seeds=1 rounds=2 prompts=400 labels=160 episodes=480 runs=runs/llama2_rounds_fast output=$runs/results
            arms=(graded once)
            [[ ! -e $output/rounds.png ]] || rm -rf "$runs"
            ;;
        --seeds) seeds=${2:?--seeds needs a value, such as "1 2"} && shift ;;
        graded | plain | once | ensemble) arms+=("$1") ;;
        *) echo "error: $1 is none of --seeds, --fast, graded, plain, once, ensemble" >&2 && exit 1 ;;
    esac
    shift
done
((${#arms[@]})) || arms=(graded plain once ensemble)
posts=data/quickstart/posts-1/tldr/sft
bash quickstart/run.sh --data-only
source quickstart/setup.sh requirements.txt
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
SECONDS=0
python llama2/rounds.py one-commit --runs "$runs" --rows "$output/rounds.csv" "$output/accuracy.csv"

step() { # print a command with the time so far, then run it
    printf '\n[%3d s] %s\n' "$SECONDS" "$*"
    "$@"
}
sft() { # a seed's SFT policy, from which all arms start
    [[ -e $1/model ]] || step python sft.py --model "quickstart/bases/nano-$size" --seed "$seed" --dataset "$posts" \
        --learning-rate 1e-3 --batch-size 32 --micro-batch-size 8 --resume --output-dir "$1"
}
label() { # folder, prompts to skip, number of prompts, policies
    [[ -e $1 ]] || step python ensembles/gold_label.py --policy "${@:4}" --temperature 0.7 1.0 --seed "$seed" \
        --gold quickstart/truth.py:score --dataset "$posts" --skip-prompts "$2" --prompts "$3" \
        --grade-bounds 0.2 0.35 0.55 --label-noise 0 0.25 --output-dir "$1"
}
reward() { # folder, pairs, margin, seed
    [[ -e $1/model ]] || step python llama2/reward.py --model "nano-$size" --seed "$4" --sft-model-path "$sft" \
        --dataset "$posts" --preference-dataset "$2" --margin "$3" --learning-rate 1e-3 --batch-size 16 \
        --micro-batch-size 8 --resume --output-dir "$1"
}
rows() { # file, start of a row: is one there?
    grep -qs "^$2" "$output/$1.csv"
}
judged() { # are the arm's rows of accuracy there, or not wanted? once's pairs are the rounds', the ensemble has none
    [[ $arm == ensemble ]] || rows accuracy "$arm,$size,$seed," ||
        [[ $arm == once && ! -e ${here/%once/graded}/$rounds/labelled ]]
}
policy() { # folder, script, reward models and other flags
    [[ -e $1/model ]] || step python "$2" --model "nano-$size" --seed "$seed" --sft-model-path "$sft" --dataset "$posts" \
        --learning-rate 1e-4 --batch-size 64 --micro-batch-size 64 --total-episodes "$episodes" --sample-every 0 \
        --save-every 10 --resume --output-dir "$1" "${@:3}"
}

for seed in $seeds; do
    sft=$runs/$size/$seed/sft
    for arm in "${arms[@]}"; do
        here=$runs/$size/$seed/$arm
        last=$rounds number=$prompts count=$labels margin=small
        if [[ $arm == once || $arm == ensemble ]]; then
            last=1 number=$((rounds * prompts)) count=$((rounds * labels))
        fi
        [[ $arm != plain ]] || margin=none
        if rows rounds "$arm,$size,$seed,$last," && judged; then
            continue
        fi
        sft "$sft"
        policies=("$sft") labelled=()
        for ((round = 1; round <= last; round++)); do
            now=$here/$round
            answers=${here/%ensemble/once}/$round/labelled # the ensemble's pairs are once's
            labelled+=("$answers")
            label "$answers" $(((round - 1) * number)) "$number" "${policies[@]}"
            [[ -e $now/pairs ]] || step python llama2/rounds.py merge --labelled "${labelled[@]}" --to "$now/pairs" \
                --count "$count"
            if [[ $arm == ensemble ]]; then
                members=()
                for member in 1 2 3 4 5; do
                    members+=("$now/reward_$member")
                    reward "$now/reward_$member" "$now/pairs/preference" $margin "$seed$member"
                done
                policy "$now/ppo" ensembles/ppo.py --reward-model-paths "${members[@]}" --value-start reward \
                    --no-standardise-members
            else
                reward "$now/reward" "$now/pairs/preference" $margin "$seed"
                policy "$now/ppo" ppo.py --reward-model-path "$now/reward"
            fi
            rows rounds "$arm,$size,$seed,$round," || step python llama2/rounds.py measure --run "$now" --output "$output"
            policies=("$now/ppo" "${policies[0]}")
        done
        judged ||
            step python llama2/rounds.py accuracies --run "$here" --trained "$last" --sampled "$rounds" --output "$output"
    done
done
step python llama2/rounds.py show --output "$output"
