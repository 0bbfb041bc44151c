#!/usr/bin/env bash
# How many rows a second tldr_dataset.py tokenises: 20,000 posts and 20,000 pairs, those of a folder over and over, by the
# version without processes (commit c633e6f), by one process and by two. The data sets must be the same bytes.
#
#   bash benchmark/tldr_speed.sh [../shared/data]      # results: benchmark/results/tldr_dataset.md
set -euo pipefail
export PATH="${VIRTUAL_ENV:-$PWD/.venv}/bin:$PATH" OMP_NUM_THREADS=1
raw=${1:-../shared/data}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for name in tldr_posts tldr_comparisons; do
    mkdir "$work/$name"
    awk '{ rows[NR] = $0 } END { for (i = 0; i < 20000; i++) print rows[i % NR + 1] }' \
        "$raw/$name/train.jsonl" >"$work/$name/train.jsonl"
done
git show c633e6f:tldr_dataset.py >"$work/before.py"
cp tldr_dataset.py "$work/now.py"
TIMEFORMAT='%0R s, of which on the processors %0U s + %0S s (reading, statistics and writing included)'
run() { # name of the result, script, its arguments
    printf '\n%s: load %s\n' "$1" "$(cut -d ' ' -f 1 /proc/loadavg)"
    time python "$work/$2.py" --sft-dataset "$work/tldr_posts" --preference-dataset "$work/tldr_comparisons" \
        --tokenizer "$raw/tokenizer" --output-dir "$work/$1" "${@:3}" | grep rows/s
}
run before before
run one now --num-proc 1
run two now --num-proc 2
for name in sft preference; do
    (cd "$work" && sha256sum {before,one,two}/$name/train/*.arrow)
done
