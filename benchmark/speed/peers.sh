#!/usr/bin/env bash
# Environments of the peers of benchmark/speed/throughput.py, apart from ours:  bash benchmark/speed/peers.sh [folder, default .peers]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

folder=${1:-.peers}
for version in 1.16.0 1.11.0; do # 1.11.0 is the last with PPO
    [[ -e $folder/trl-$version/bin/python ]] || python3 -m venv "$folder/trl-$version"
    "$folder/trl-$version/bin/pip" install --quiet -r requirements.txt "trl==$version"
done
