#!/usr/bin/env bash
# Everything that one GPU has to show, in one call of at most nine minutes:
#
#   bash benchmark/speed/gpu.sh FOLDER                          # Pythia 1B's shape with random weights, bfloat16
#   bash benchmark/speed/gpu.sh --device cpu --tiny FOLDER      # the same parts on a CPU, in two and a half minutes
#
# Each part has a time limit of its own, and what it does not use is the next one's; on a CPU the limits are ten times as
# long. FOLDER/page.md is written anew after each part.
# PYTHON in the environment is the interpreter (default: python3). Packages that are missing are taken from the folder
# wheels/, where there is one. Data and models are made in data/gpu.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

flags=() folder="" device=cuda
while (($#)); do
    case $1 in
        --device) device=${2:-} && shift 2 ;;
        --tiny) flags+=(--tiny) && shift ;;
        *) folder=$1 && shift ;;
    esac
done
if [[ -z $folder || ! $device =~ ^(cpu|cuda)$ ]]; then
    echo "error: usage: bash benchmark/speed/gpu.sh [--device cpu|cuda] [--tiny] FOLDER" >&2
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
rm -f "$folder"/{device,correctness,decoding,stages,trl}.csv "$folder"/{page.md,failed.txt}
part data 80
part device 20
part ppo 130
part correctness 90
part decoding 50
part sft 40
part reward 40
part dpo 45
part trl 35
part page 10
exit $failed
