#!/usr/bin/env bash
# Everything that one GPU has to show, at Pythia 1B's shape with random weights in bfloat16:
#
#   bash benchmark/speed/gpu.sh --half 1 FOLDER          # device, decoding, correctness and PPO: at most seven minutes
#   bash benchmark/speed/gpu.sh --half 2 FOLDER          # the other stages beside TRL, which peers.sh has installed
#   bash benchmark/speed/gpu.sh FOLDER                   # both
#
# PYTHON in the environment is the interpreter (default: python3). Packages that are missing are taken from the folder
# wheels/, where there is one. Each part adds its table to FOLDER; one that fails, or takes too long, makes the exit code 1.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

half=""
[[ ${1:-} == --half ]] && half=$2 && shift 2
if [[ $# != 1 || ! $half =~ ^[12]?$ ]]; then
    echo "error: usage: bash benchmark/speed/gpu.sh [--half 1|2] FOLDER" >&2
    exit 1
fi
folder=$1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=offline
python=${PYTHON:-python3}
"$python" -c 'import datasets, tyro' 2>/dev/null ||
    "$python" -m pip install --quiet --no-index --find-links wheels datasets tyro

failed=0
part() { # seconds that it may take, script, flags...
    echo "== ${*:2} (at most $1 s, $SECONDS s gone)"
    timeout --kill-after=5 "$1" "$python" "benchmark/speed/$2" "${@:3}" --device cuda --output-dir "$folder" || failed=1
}
speed() { # seconds, stage, batch size, micro-batch size, updates, flags...
    part "$1" throughput.py --stage "$2" --batch-size "$3" --micro-batch-size "$4" --updates "$5" --raw nowhere \
        --forward-batch-size 32 --work data/gpu_1b "${@:6}"
}
if [[ $half != 2 ]]; then
    part 30 gpu.py device
    part 80 gpu.py decoding
    part 115 gpu.py correctness
    speed 220 ppo 512 16 2 --sample-batch-size 256
fi
if [[ $half != 1 ]]; then
    for stage in sft reward dpo; do
        micro=$([[ $stage == sft ]] && echo 16 || echo 32)
        batch=$([[ $stage == sft ]] && echo 128 || echo 64)
        speed 140 "$stage" "$batch" "$micro" 4 --peer trl
    done
fi
exit $failed
