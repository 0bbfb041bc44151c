#!/usr/bin/env bash
# The whole pipeline on a laptop, without a GPU, any data or the Hub: generated posts whose truth is known, a nano base
# model, the four stages with evaluation, one table and figures.
#
#   bash quickstart/run.sh [--size xs|s|m] [--seed N] [--posts-seed N] [--fast] [--continue] [--data-only]
#
#   --size        of the base model in quickstart/bases: 0.1, 0.4 or 0.8 million parameters without embeddings (default s)
#   --seed        of the stages (default 1)
#   --posts-seed  of the generated posts (default 1)
#   --fast        half of the pairs, and a quarter of PPO's and DPO's updates: about five minutes
#   --continue    keep the stages of this size and seed that are finished; the others start anew
#   --data-only   stop once the data are there
#
# Data are made once, in data/quickstart/posts-N; runs land in runs/quickstart/posts-N/{stage}/nano-{size}/{seed}, the
# table and the figures in runs/quickstart/posts-N/report/nano-{size}/{seed}.
set -euo pipefail
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    echo "error: ${1}usage: bash quickstart/run.sh [--size xs|s|m] [--seed N] [--posts-seed N] [--fast] [--continue]" \
        "[--data-only]" >&2
    exit 1
}
size="" seed=1 posts_seed=1 fast="" resume="" data_only=""
while (($#)); do
    case $1 in
        --fast) fast=-fast ;;
        --continue) resume=--resume ;;
        --data-only) data_only=yes ;;
        --size | --seed | --posts-seed)
            [[ $# -gt 1 && -n $2 ]] || usage "$1 needs a value; "
            case $1 in --size) size=$2 ;; --seed) seed=$2 ;; *) posts_seed=$2 ;; esac
            shift
            ;;
        *) usage "unknown argument $1; " ;;
    esac
    shift
done
size=${size:-s}
[[ $size =~ ^(xs|s|m)$ ]] || usage "--size is $size, not xs, s or m; "
[[ $seed =~ ^(0|[1-9][0-9]*)$ ]] || usage "--seed is $seed, not a whole number; "
[[ $posts_seed =~ ^(0|[1-9][0-9]*)$ ]] || usage "--posts-seed is $posts_seed, not a whole number; "
model=nano-$size
data=data/quickstart/posts-$posts_seed$fast
runs=runs/quickstart/posts-$posts_seed$fast

# ---- environment ----------------------------------------------------------------------------------------------------
source quickstart/setup.sh requirements.txt
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false MPLBACKEND=agg
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)}
# Apple's GPUs are slower than its CPUs at this size; ACCELERATE_USE_CPU=false uses them all the same
[[ $(uname) != Darwin ]] || export ACCELERATE_USE_CPU=${ACCELERATE_USE_CPU:-true}
SECONDS=0

step() { # print a command with the time so far, then run it
    printf '\n[%3d s] %s\n' "$SECONDS" "$*"
    "$@"
}

# ---- data: made once ------------------------------------------------------------------------------------------------
counts=()
episodes=3840 pairs=8000 # of PPO and DPO; the reward model sees all pairs
epochs=1                 # of SFT; "my guitar, at 25" is in no document of the bases: m copies such an age after three only
[[ $size != m ]] || epochs=3
if [[ $fast ]]; then
    counts=(--num-validation 200 --num-test 50 --num-comparisons 8000 --num-validation-comparisons 300
        --num-cnndm-comparisons 100)
    episodes=960 pairs=2000
fi
version=$(cat quickstart/{posts.py,truth.py,sentences.json} | cksum)
if [[ -e $data/version && $(<"$data/version") != "$version" ]]; then # metric.py measures on posts of today's
    echo "error: $data is of another version of posts.py, truth.py or sentences.json: remove it, and run this again" >&2
    exit 1
fi
if [[ ! -e $data/raw ]]; then
    step python quickstart/posts.py --seed "$posts_seed" --output-dir "$data/raw" ${counts[@]+"${counts[@]}"}
    mkdir -p "$data"
    echo "$version" >"$data/version"
fi
[[ -e $data/tldr ]] || step python tldr_dataset.py --sft-dataset "$data/raw/posts" \
    --preference-dataset "$data/raw/comparisons" --tokenizer "quickstart/bases/$model" --output-dir "$data/tldr"
[[ -z $data_only ]] || exit 0

# ---- stages ---------------------------------------------------------------------------------------------------------
rm -rf "$runs/report/$model/$seed"
stage() { # run a stage; without --continue, a run folder from before is removed
    local name=$1 run=$runs/$1/$model/$seed
    shift
    if [[ -e $run && -z $resume ]]; then
        echo "removing $run of an earlier quickstart"
        rm -r "$run"
    fi
    step python "$name.py" --model "quickstart/bases/$model" --seed "$seed" --output-dir "$run" $resume "$@"
}
samples() { # of a policy, unless they are there: with their ROUGE and, with a reward model, its scores
    [[ -e $1/eval/rouge.csv ]] || step python eval/samples.py "$1" --dataset "$posts" "${@:2}"
}
sft=$runs/sft/$model/$seed
reward=$runs/reward/$model/$seed
ppo=$runs/ppo/$model/$seed
dpo=$runs/dpo/$model/$seed
posts=$data/tldr/sft
preferences=$data/tldr/preference

stage sft --dataset "$posts" --num-train-epochs $epochs --learning-rate 1e-3 --batch-size 32 --micro-batch-size 8
samples "$sft"
stage reward --sft-model-path "$sft" --dataset "$posts" --preference-dataset "$preferences" --run-eval \
    --learning-rate 1e-3 --batch-size 16 --micro-batch-size 8
stage ppo --sft-model-path "$sft" --reward-model-path "$reward" --dataset "$posts" \
    --learning-rate 1e-4 --batch-size 64 --micro-batch-size 16 --sample-every 10 --total-episodes $episodes
samples "$ppo" --reward-model-path "$reward" --splits validation
stage dpo --sft-model-path "$sft" --preference-dataset "$preferences" --run-eval \
    --learning-rate 2e-5 --batch-size 32 --micro-batch-size 8 --total-episodes $pairs
samples "$dpo"

# ---- results --------------------------------------------------------------------------------------------------------
step python quickstart/report.py --runs "$runs" --model "$model" --seed "$seed"
printf '\n[%3d s] done\n' "$SECONDS"
