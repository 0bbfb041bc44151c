#!/usr/bin/env bash
# The whole chain on a pretrained language model and real posts, with one seed. Stop it at any point: the same command
# continues there.
#
#   bash benchmark/pretrained.sh                              # SmolLM2-135M and the published data from the Hub; one GPU
#   bash benchmark/pretrained.sh --small [FOLDER]             # two CPU cores, two and a half hours
#   bash benchmark/pretrained.sh --gpu [FOLDER]               # one GPU of 80 GB
#   bash benchmark/pretrained.sh --model FOLDER|HUB_ID ...    # another model; benchmark/smollm2.py makes one offline
#
#   FOLDER   raw data instead of the published sets: tldr_posts/ and tldr_comparisons/ with their columns
#   --small  queries of at most 192 tokens (whole paragraphs go, Detail 2), small batches, learning rates that fit them
#   --gpu    whole posts, one pass over them, and 9,984 responses each for PPO, PPO with the paper's lambda, and RLOO. What
#            needs nothing of each other runs side by side: a small model's speed is bound by kernel launches, not by the GPU
#
# Pairs on posts of the SFT data's validation and test splits are left out of training. `timeout 25m bash ...` ends in
# good order: PPO and RLOO finish their update and write a checkpoint, which is sampled; the same command continues.
#
# Data land in data/pretrained/{model}, runs in runs/pretrained/{model}/{stage}, with --small or --gpu in {model}-small or
# {model}-gpu. At the end benchmark/pretrained.py prints the tables and draws the curves of benchmark/pretrained.md.
set -euo pipefail
here=$PWD
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."

model=HuggingFaceTB/SmolLM2-135M small="" gpu="" raw="" seed=1
usage="usage: bash benchmark/pretrained.sh [FOLDER] [--small | --gpu] [--model FOLDER|HUB_ID]"
while (($#)); do
    case $1 in
        --small) small=-small gpu="" ;;
        --gpu) gpu=-gpu small="" ;;
        --model) [[ -n ${2:-} ]] || { echo "error: --model needs a value; $usage" >&2 && exit 1; }
            model=$2 && shift
            [[ $model == /* || ! -d $here/$model ]] || model=$here/$model ;;
        -*) echo "error: unknown argument $1; $usage" >&2 && exit 1 ;;
        /*) raw=$1 ;;
        *) raw=$here/$1 ;;
    esac
    shift
done
if [[ $raw && ! -d $raw/tldr_posts ]]; then
    echo "error: $raw/tldr_posts is not there; $usage" >&2 && exit 1
fi
if [[ $small ]]; then # freed blocks stay with the process: a float32 pass on a CPU takes a tenth to a fifth less time
    blocks=glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592
    export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1:$blocks}
fi
source quickstart/setup.sh requirements.txt
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)}

name=$(basename "$model")$small$gpu
data=data/pretrained/$name runs=runs/pretrained/$name
common=(--model "$name" --seed "$seed" --resume) # a run that has ended is left as it is
output=benchmark/results/pretrained
lengths=() sft=() reward=() dpo=() ppo=() rloo=() samples=(--batch-size 32) # of the full data: the paper's settings, which are the defaults
if [[ $small ]]; then
    lengths=(--max-query-length 192)
    sft=(--batch-size 16 --micro-batch-size 4 --learning-rate 1e-4 --total-episodes 640 --save-every 10)
    reward=(--batch-size 16 --micro-batch-size 4 --learning-rate 5e-5 --save-every 10)
    dpo=(--batch-size 16 --micro-batch-size 4 --learning-rate 2e-5 --save-every 10)
    # the value model starts 3.7 above the scores, and 16 updates are few: lambda 1 keeps that offset out of the advantages
    ppo=(--batch-size 16 --micro-batch-size 8 --learning-rate 1e-5 --lam 1 --total-episodes 256 --save-every 2)
    rloo=(--batch-size 32 --micro-batch-size 8 --learning-rate 2e-5 --total-episodes 512 --save-every 2)
    # of a processor that multiplies bfloat16 by itself; without such instructions it is seven times slower than float32
    if grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo 2>/dev/null; then common+=(--mixed-precision bf16); fi
fi
if [[ $gpu ]]; then
    output+=_gpu
    sft=(--batch-size 16 --micro-batch-size 16 --learning-rate 1e-4)
    reward=(--batch-size 16 --micro-batch-size 16 --learning-rate 5e-5)
    dpo=(--batch-size 16 --micro-batch-size 16 --learning-rate 5e-6)
    rloo=(--batch-size 256 --micro-batch-size 32 --sample-batch-size 256 --total-episodes 9984 --save-every 13)
    rloo+=(--learning-rate 1e-5)
    ppo=("${rloo[@]}" --lam 1) # as with --small
    samples=(--batch-size 256)
    export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True} # rows of many lengths
fi

# ---- data -----------------------------------------------------------------------------------------------------------
tokenise() { # raw posts and comparisons, or only posts, into tokens of the model; 57 tokens of SmolLM2 are 53 of Pythia
    python tldr_dataset.py --tokenizer "$model" --max-sft-response-length 57 ${lengths[@]+"${lengths[@]}"} "$@"
}
sources=()
[[ ! $raw ]] || sources=(--sft-dataset "$raw/tldr_posts" --preference-dataset "$raw/tldr_comparisons")
made_of="--tokenizer $model ${lengths[*]-} ${sources[*]-}"
if [[ -e $data/made_of && $(<"$data/made_of") != "$made_of" ]]; then
    echo "error: $data was made with $(<"$data/made_of"), not with $made_of: move $data and $runs away" >&2 && exit 1
fi
mkdir -p "$data"
echo "$made_of" >"$data/made_of"
[[ -e $data/tldr ]] || tokenise ${sources[@]+"${sources[@]}"} --output-dir "$data/tldr"
if [[ ! -e $data/invented ]]; then # five posts as every split: samples.py asks for train, too
    mkdir -p "$data/posts"
    for split in train validation; do cp benchmark/invented_posts.jsonl "$data/posts/$split.jsonl"; done
    tokenise ${sources[@]+"${sources[@]}"} --sft-dataset "$data/posts" --output-dir "$data/invented"
fi
[[ -e $data/pairs ]] || python benchmark/pretrained.py --data "$data/tldr" --held-out "$data/pairs"
posts=(--dataset "$data/tldr/sft") pairs=(--preference-dataset "$data/pairs")

# ---- stages ---------------------------------------------------------------------------------------------------------
# TERM, of `timeout`, goes to all processes here. Training follows it: before its first update it ends at once, and then
# with code 75, once it has written a checkpoint. All else goes on, and no other training begins.
rang=""
trap 'rang=yes' TERM
start=(--sft-model-path "$runs/sft")
online=("${start[@]}" --reward-model-path "$runs/reward" "${posts[@]}" --sample-every 4)

train() { # a stage
    case $1 in
        sft) set -- sft.py "$1" --model "$model" "${posts[@]}" ${sft[@]+"${sft[@]}"} ;;
        reward) set -- reward.py "$1" "${start[@]}" "${posts[@]}" "${pairs[@]}" --run-eval ${reward[@]+"${reward[@]}"} ;;
        dpo) set -- dpo.py "$1" "${start[@]}" "${pairs[@]}" --run-eval ${dpo[@]+"${dpo[@]}"} ;;
        ppo) set -- ppo.py "$1" "${online[@]}" ${ppo[@]+"${ppo[@]}"} ;;
        ppo_lam_095) set -- ppo.py "$1" "${online[@]}" ${ppo[@]+"${ppo[@]}"} --lam 0.95 ;;
        rloo) set -- variants/rloo.py "$1" "${online[@]}" ${rloo[@]+"${rloo[@]}"} ;;
    esac
    (trap - TERM && exec python "$1" "${common[@]}" --output-dir "$runs/$2" "${@:3}")
}
sample() { # summaries of a stage's model for the validation posts, and for five invented ones
    local checkpoint=$runs/$1 weights=$runs/$1/model what folder
    [[ $1 != zero_shot ]] || checkpoint=$model weights=$model
    if [[ $1 != zero_shot && ! -d $weights ]]; then # the clock stopped it
        checkpoint=$runs/$1/checkpoints/policy weights=$checkpoint
        if ! compgen -G "$runs/$1/checkpoints/update_*" >/dev/null; then
            echo "$runs/$1 has no checkpoint to sample yet" && return
        fi
        (trap '' TERM && exec python benchmark/pretrained.py --runs "$runs" --newest-checkpoint "$1")
    fi
    for what in tldr invented; do
        folder=$runs/samples/$what/$1
        [[ $folder/eval/rouge.csv -nt $weights ]] || (trap '' TERM && exec python eval/samples.py "$checkpoint" \
            --seed "$seed" --dataset "$data/$what/sft" --reward-model-path "$runs/reward" --splits validation \
            --output-dir "$folder" "${samples[@]}")
    done
}
policy() { # train a stage that the clock may stop
    local code=0
    train "$1" || code=$?
    case $code in
        0) ;;
        75 | 143) touch "$runs/stopped" ;;
        *) exit $code ;;
    esac
}
together() { # run commands side by side with --gpu, and else one after the other
    local command jobs=() code=0
    for command in "$@"; do
        if [[ $gpu ]]; then
            (trap '' TERM && $command) &
            jobs+=($!)
        else
            $command
        fi
    done
    for job in ${jobs[@]+"${jobs[@]}"}; do
        until wait "$job"; do # TERM ends wait
            kill -0 "$job" 2>/dev/null || { wait "$job" || code=$?; break; }
        done
    done
    return $code
}
go_on() { [[ -z $rang ]] || { echo "stopped by TERM; the same command continues" && exit 75; }; }

train sft
go_on
together "train reward" "train dpo"
go_on
rm -f "$runs/stopped"
together "policy ppo" ${gpu:+"policy ppo_lam_095"} # 37 GB each with --gpu
others=("sample zero_shot" "sample sft" "sample dpo" "sample ppo" ${gpu:+"sample ppo_lam_095"})
if [[ $rang || -e $runs/stopped ]]; then
    together "${others[@]}"
else
    together "policy rloo" "${others[@]}"
    sample rloo
fi
trap '' TERM
python benchmark/pretrained.py --runs "$runs" --data "$data/tldr" --output $output
