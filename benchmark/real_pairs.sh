#!/usr/bin/env bash
# A nano reward model's agreement with the judge of 853 real comparisons, and its calibration: five folds without a post
# on both sides, each judged by a model trained on the other four, so that every pair is judged once by a model that has
# not seen it. The choices of these pairs are a language model's but for 24, so that accuracy is agreement with a judge.
#
#   bash benchmark/real_pairs.sh [folder with tldr_posts/, tldr_comparisons/ and tokenizer/]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

raw=${1:-../shared/data}
work=data/real_pairs
runs=runs/real_pairs
source quickstart/setup.sh requirements.txt
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

python - "$raw/tldr_comparisons" "$work" <<'PYTHON'
import json, pathlib, random, sys

source, work = map(pathlib.Path, sys.argv[1:])
rows = [json.loads(line) for name in ("train", "validation") for line in open(source / f"{name}.jsonl")]
posts = sorted({row["info"]["post"] for row in rows})
random.Random(1).shuffle(posts)
fold_of = {post: i % 5 for i, post in enumerate(posts)}
for fold in range(5):
    folder = work / f"raw-{fold}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "validation"):
        mine = [row for row in rows if (fold_of[row["info"]["post"]] == fold) == (name == "validation")]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mine))
chosen = [(row["summaries"][row["choice"]], row["summaries"][1 - row["choice"]]) for row in rows]
longer = [(len(a["text"].split()) > len(b["text"].split())) + 0.5 * (len(a["text"].split()) == len(b["text"].split()))
          for a, b in chosen]
print(f"{len(rows)} pairs; the choice is the longer summary in {sum(longer) / len(rows):.3f}, the policy's, not the "
      f"reference, in {sum(a['policy'] != 'ref' for a, b in chosen if a['policy']) / sum(1 for a, _ in chosen if a['policy']):.3f}, "
      f"the first in {sum(row['choice'] == 0 for row in rows) / len(rows):.3f}")
PYTHON
python quickstart/nano.py --tokenizer "$raw/tokenizer" --size xs --output-dir "$work/nano-xs"
for fold in 0 1 2 3 4; do
    python tldr_dataset.py --sft-dataset "$raw/tldr_posts" --preference-dataset "$work/raw-$fold" \
        --tokenizer "$raw/tokenizer" --output-dir "$work/tldr-$fold"
    [[ $fold != 0 ]] || python sft.py --model "$work/nano-xs" --dataset "$work/tldr-0/sft" --seed 44413 --batch-size 32 \
        --micro-batch-size 2 --learning-rate 5e-3 --output-dir "$runs/sft"
    python reward.py --model nano-xs --sft-model-path "$runs/sft" --dataset "$work/tldr-$fold/sft" --seed 44413 \
        --preference-dataset "$work/tldr-$fold/preference" --num-train-epochs "${EPOCHS:-1}" --batch-size 32 \
        --learning-rate 1e-3 --run-eval --output-dir "$runs/reward/nano-xs/$fold"
done
python eval/rm_report.py --models nano-xs --seeds 0 1 2 3 4 --runs "$runs" --output benchmark/results/nano/real_pairs
