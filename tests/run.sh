#!/usr/bin/env bash
# Lint and all tests, from a fresh clone or not:  bash tests/run.sh [arguments for pytest, such as -k name]
set -euo pipefail
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."

source quickstart/setup.sh tests/requirements.txt
# one thread a process: the tests run two at a time, and some of them start processes of their own
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=offline
export CUDA_VISIBLE_DEVICES="" # on a GPU, stages compute in bfloat16; tests of the GPU: README.md
[[ $(uname) != Darwin ]] || export ACCELERATE_USE_CPU=true # not on Linux, where it turns DeepSpeed off

git ls-files -z '*.py' | xargs -0 ruff check # a user's copies are their own
git ls-files -z '*.py' | xargs -0 ruff format --check
# a file's runs that its tests share are made once: all of its tests go to one process
python -m pytest -n 2 --dist loadfile tests "$@"
