#!/usr/bin/env bash
# Everything that one GPU has to show, in one call of at most nine minutes:
#
#   bash benchmark/gpu.sh FOLDER                          # Pythia 1B's shape with random weights, bfloat16
#   bash benchmark/gpu.sh --device cpu --tiny FOLDER      # the same parts on a CPU, in two and a half minutes
#
# Each part has a time limit of its own; FOLDER/page.md is written anew after each. Packages that are missing are taken
# from the folder wheels/, where there is one. Data and models are made in data/gpu.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

flags=() folder="" device=cuda
while (($#)); do
    case $1 in
        --device) device=${2:-} && shift 2 ;;
        --tiny) flags+=(--tiny) && shift ;;
        *) folder=$1 && shift ;;
    esac
done
if [[ -z $folder || ! $device =~ ^(cpu|cuda)$ ]]; then
    echo "error: usage: bash benchmark/gpu.sh [--device cpu|cuda] [--tiny] FOLDER" >&2
    exit 1
fi
mkdir -p "$folder"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=offline
python -c 'import datasets, tyro' 2>/dev/null || python -m pip install --quiet --no-index --find-links wheels datasets tyro

failed=0
part() { # a part, and the seconds it may take, of the nine minutes that are left
    local limit=$((535 - SECONDS))
    ((limit < $2)) || limit=$2
    echo "== $1 (at most $limit s, $SECONDS s gone)"
    ((limit > 0)) || limit=1
    timeout --kill-after=5 "$limit" python benchmark/gpu.py "$1" --device "$device" --output-dir "$folder" ${flags[@]+"${flags[@]}"}
    local code=$?
    if ((code)); then
        failed=1
        echo "$1 ended with exit code $code after $SECONDS s in all" | tee -a "$folder/failed.txt"
    fi
}
rm -f "$folder"/{device,correctness,decoding,stages,trl}.csv "$folder"/{page.md,failed.txt}
part data 120
part device 30
part correctness 110
part decoding 75
part ppo 170
part sft 50
part reward 50
part dpo 50
part trl 60
python benchmark/gpu.py page --device "$device" --output-dir "$folder" ${flags[@]+"${flags[@]}"}
exit $failed
