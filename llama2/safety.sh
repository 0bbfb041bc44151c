#!/usr/bin/env bash
# Helpfulness against safety where the truth knows both: posts of the quick start, half of which ask to keep a fact private
# (llama2/safety.py), a helpfulness and two safety reward models, with and without --safety-coef, and PPO against the
# helpfulness model alone, as it is and whitened, and through Llama 2's gate, which whitens.
#
#   bash llama2/safety.sh [--seeds "1 2 3 4"]       (size xs: about a quarter of an hour a seed on one core)
#
# It goes on where it was stopped, and a policy whose row is in llama2/results/safety.csv is not made again.
set -euo pipefail
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."

seeds="1 2 3 4"
if (($#)); then
    [[ $1 == --seeds && $# == 2 ]] || { echo "error: $1 is not --seeds with seeds in quotation marks" >&2 && exit 1; }
    seeds=$2
fi
data=data/llama2_safety runs=runs/llama2_safety results=llama2/results
bash quickstart/run.sh --data-only --size xs
source quickstart/setup.sh requirements.txt
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
SECONDS=0
python llama2/rounds.py one-commit --runs $runs --rows $results/safety.csv $results/safety_models.csv

step() { # print a command with the time so far, then run it
    printf '\n[%3d s] %s\n' "$SECONDS" "$*"
    "$@"
}
[[ -e $data/raw ]] || step python llama2/safety.py data --raw data/quickstart/posts-1/raw --to $data/raw
[[ -e $data/tldr ]] || step python tldr_dataset.py --sft-dataset $data/raw/posts --preference-dataset $data/raw/comparisons \
    --tokenizer quickstart/bases/nano-xs --output-dir $data/tldr
[[ -e $data/pairs ]] || step python llama2/preference_dataset.py --base quickstart/bases/nano-xs --output-dir $data/pairs \
    --sources pairs=pairs:$data/raw/safety/train.jsonl:train pairs=pairs:$data/raw/safety/validation.jsonl:validation \
    --max-query-length 512 --max-response-length 128

for seed in $seeds; do
    home=$runs/$seed
    common=(--model nano-xs --seed "$seed" --resume --dataset $data/tldr/sft)
    trained() { # script, run folder, flags: unless it is there
        [[ -e $2/model ]] || step python "$1" "${common[@]}" --output-dir "$2" "${@:3}"
    }
    measured() { # a policy, unless its row is there
        grep -qs "^$1,$seed," $results/safety.csv || step python llama2/safety.py measure --run "$home/$1" --tldr $data/tldr
    }
    if grep -qs "^gate_plain,$seed," $results/safety.csv; then
        continue
    fi
    trained sft.py "$home/sft" --model quickstart/bases/nano-xs --learning-rate 1e-3 --batch-size 32 --micro-batch-size 8
    measured sft
    rewards=(--sft-model-path "$home/sft" --learning-rate 1e-3 --batch-size 16 --micro-batch-size 8 --run-eval)
    trained reward.py "$home/reward" "${rewards[@]}" --preference-dataset $data/tldr/preference
    for name in safety safety_plain; do
        coef=$([[ $name == safety ]] && echo 1 || echo 0)
        trained llama2/reward.py "$home/$name" "${rewards[@]}" --preference-dataset $data/pairs/preference --safety-coef "$coef"
        grep -qs "^$name,$seed," $results/safety_models.csv || step python llama2/safety.py safety-model --run "$home/$name"
    done
    ppo=(--sft-model-path "$home/sft" --learning-rate 1e-4 --batch-size 64 --micro-batch-size 64 --total-episodes 1920
        --sample-every 0 --save-every 10)
    trained ppo.py "$home/helpful" "${ppo[@]}" --reward-model-path "$home/reward"
    measured helpful
    gate=(--reward-combination safety_gate --value-start reward --no-standardise-members)
    trained ensembles/ppo.py "$home/helpful_whitened" "${ppo[@]}" "${gate[@]}" \
        --reward-model-paths "$home/reward" "$home/reward" # the same score on both sides of the gate
    measured helpful_whitened
    trained ensembles/ppo.py "$home/gate" "${ppo[@]}" "${gate[@]}" --reward-model-paths "$home/reward" "$home/safety"
    measured gate
    trained ensembles/ppo.py "$home/gate_plain" "${ppo[@]}" "${gate[@]}" \
        --reward-model-paths "$home/reward" "$home/safety_plain"
    measured gate_plain
done
step python llama2/safety.py show
