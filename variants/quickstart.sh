#!/usr/bin/env bash
# Every variant on the quickstart's data, and one table beside PPO and DPO at the quickstart's settings.
#
#   bash variants/quickstart.sh [--size xs|s|m] [--seeds 1 2 ...] [--posts-seed N] [--fast]
#
# The quickstart's stages are run first where they are not there; what is finished is kept. A seed's table is printed, and
# lands in runs/quickstart/posts-N/report/nano-{size}/{seed}/variants.csv. With several seeds variants/ranking.py then
# compares all of them: seeds.csv and truth_over_kl.png in runs/quickstart/posts-N/report/nano-{size}.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

size="" seeds=() posts_seed=1 fast=""
while (($#)); do
    case $1 in
        --fast) fast=-fast && shift ;;
        --size) size=$2 && shift 2 ;;
        --posts-seed) posts_seed=$2 && shift 2 ;;
        --seed | --seeds)
            shift
            while (($#)) && [[ $1 != --* ]]; do seeds+=("$1") && shift; done
            ;;
        *) echo "error: unknown argument $1; usage: bash variants/quickstart.sh [--size xs|s|m] [--seeds 1 2 ...]" \
            "[--posts-seed N] [--fast]" >&2 && exit 1 ;;
    esac
done
size=${size:-$([[ $fast ]] && echo xs || echo s)}
((${#seeds[@]})) || seeds=(1)

source quickstart/setup.sh requirements.txt
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)}
model=nano-$size
data=data/quickstart/posts-$posts_seed$fast
runs=runs/quickstart/posts-$posts_seed$fast
episodes=$([[ $fast ]] && echo 960 || echo 3840) # as PPO and DPO in quickstart/run.sh
pairs=$([[ $fast ]] && echo 2000 || echo 8000)

variant() { # script, then flags; what is finished is kept
    local script=$1 run=$runs/$(basename "$1" .py)/$model/$seed
    shift
    folders+=("$run")
    [[ ! -e $run/eval/rouge.csv ]] || return 0
    rm -rf "$run"
    echo && echo "$script $*"
    python "$script" --model "quickstart/bases/$model" --seed "$seed" --output-dir "$run" --sft-model-path "$sft" "$@"
    python eval/samples.py "$run" --dataset "$data/tldr/sft" --splits validation
}

for seed in "${seeds[@]}"; do
    table=$runs/report/$model/$seed/variants.csv
    [[ ! -e $table || ${#seeds[@]} == 1 ]] || continue
    bash quickstart/run.sh --size "$size" --seed "$seed" --posts-seed "$posts_seed" ${fast:+--fast} --continue
    sft=$runs/sft/$model/$seed reward=$runs/reward/$model/$seed folders=()
    online=(--dataset "$data/tldr/sft" --learning-rate 1e-4 --batch-size 64 --micro-batch-size 16 --sample-every 10
        --total-episodes "$episodes")
    variant variants/rloo.py "${online[@]}" --reward-model-path "$reward"
    variant variants/grpo.py "${online[@]}" --reward-model-path "$reward"
    variant variants/online_dpo.py "${online[@]}" --reward-model-path "$reward"
    [[ -e ppo_function.py ]] || git apply ablations/function.diff
    variant ppo_function.py "${online[@]}" --reward-function quickstart/truth.py:score
    # a quarter of DPO's learning rate there: SimPO has no reference that holds the policy
    [[ -e simpo.py ]] || git apply ablations/simpo.diff
    variant simpo.py --preference-dataset "$data/tldr/preference" --learning-rate 5e-6 --batch-size 32 --micro-batch-size 8 \
        --total-episodes "$pairs"
    python variants/compare.py --raw "$data/raw" --sft "$sft" --runs "$runs"/{ppo,dpo}/"$model/$seed" "${folders[@]}" \
        --output "$table"
done
((${#seeds[@]} == 1)) || python variants/ranking.py --tables "$runs/report/$model" --seeds "${seeds[@]}" --output "$runs/report/$model"
