#!/usr/bin/env bash
# Everything that one GPU has to show, in two calls of at most seven minutes each:
#
#   bash benchmark/speed/gpu.sh --half 1 FOLDER                 # Pythia 1B's shape with random weights, bfloat16
#   bash benchmark/speed/gpu.sh --half 2 FOLDER                 # the rest, into the same folder; without --half, both
#   bash benchmark/speed/gpu.sh --device cpu --tiny FOLDER      # the same parts on a CPU, in two and a half minutes
#
# Each part has a time limit, a quarter more than it took on an H100 (results/h100), and what it does not use is the next
# one's; on a CPU the limits are ten times as long. FOLDER/page.md is written anew after each part.
# PYTHON in the environment is the interpreter (default: python3). Packages that are missing are taken from the folder
# wheels/, where there is one. Data and models are made in data/gpu.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

flags=() folder="" device=cuda half=""
while (($#)); do
    case $1 in
        --device) device=${2:-} && shift 2 ;;
        --half) half=${2:-} && shift 2 ;;
        --tiny) flags+=(--tiny) && shift ;;
        *) folder=$1 && shift ;;
    esac
done
if [[ -z $folder || ! $device =~ ^(cpu|cuda)$ || ! $half =~ ^[12]?$ ]]; then
    echo "error: usage: bash benchmark/speed/gpu.sh [--device cpu|cuda] [--tiny] [--half 1|2] FOLDER" >&2
    exit 1
fi
mkdir -p "$folder"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=offline
python=${PYTHON:-python3}
"$python" -c 'import datasets, tyro' 2>/dev/null ||
    "$python" -m pip install --quiet --no-index --find-links wheels datasets tyro

failed=0 due=0
part() { # a part, and its seconds on a GPU
    local seconds=$2
    [[ $device == cuda ]] || seconds=$((10 * seconds))
    due=$((due + seconds))
    local limit=$((due - SECONDS))
    ((limit > 0)) || limit=1
    echo "== $1 (at most $limit s, $SECONDS s gone)"
    local asked=("$1" --device "$device" --limit "$limit" --output-dir "$folder" ${flags[@]+"${flags[@]}"})
    timeout --kill-after=5 "$limit" "$python" benchmark/speed/gpu.py "${asked[@]}"
    local code=$?
    if ((code)); then
        failed=1
        echo "$1 ended with exit code $code after $SECONDS s in all" | tee -a "$folder/failed.txt"
    fi
}
part data 80 # once: the second half finds it, on the same machine
if [[ $half != 2 ]]; then
    rm -f "$folder"/{device,correctness,decoding,stages,trl}.csv "$folder"/{page.md,failed.txt}
    part device 20
    part decoding 60
    part correctness 115
    part ppo 145
fi
if [[ $half != 1 ]]; then
    part sft 50
    part reward 50
    part dpo 50
    part trl 170
    part page 10
fi
exit $failed
