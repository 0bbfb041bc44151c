#!/usr/bin/env bash
# The five stages on real posts and comparisons at nano size, on a laptop: the commands behind benchmark/results/chain.md.
#
#   bash benchmark/chain.sh [folder with tldr_posts/, tldr_comparisons/ and tokenizer/] [seeds...]
#
# Learning rates fit the size: a model of 0.1 M parameters wants about a thousand times the paper's 3e-6.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

raw=${1:-../shared/data}
seeds=${*:2}
source quickstart/setup.sh requirements.txt
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

python tldr_dataset.py --sft-dataset "$raw/tldr_posts" --preference-dataset "$raw/tldr_comparisons" \
    --tokenizer "$raw/tokenizer" --output-dir data/tldr
python quickstart/nano.py --tokenizer "$raw/tokenizer" --size xs --output-dir data/nano-xs
for seed in ${seeds:-44413 55513}; do
    python sft.py --model data/nano-xs --seed "$seed" --batch-size 32 --micro-batch-size 2 --learning-rate 5e-3
    python reward.py --model nano-xs --seed "$seed" --batch-size 32 --learning-rate 1e-3 --run-eval
    python ppo.py --model nano-xs --seed "$seed" --batch-size 64 --total-episodes 2880 --learning-rate 5e-4
    python dpo.py --model nano-xs --seed "$seed" --batch-size 32 --micro-batch-size 4 --learning-rate 3e-4 --run-eval
    for stage in sft ppo dpo; do python eval/samples.py "runs/$stage/nano-xs/$seed"; done
done
python benchmark/curves.py --model nano-xs --seeds ${seeds:-44413 55513} --output benchmark/results/chain
