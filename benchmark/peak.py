"""Run a script as if alone, and end with a line that says the most memory it had on the GPU.

python benchmark/peak.py ppo.py --model 1b --seed 44413
"""

import runpy
import sys
from pathlib import Path

import torch

sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
if torch.cuda.is_available():
    print(f"peak of the GPU's memory: {torch.cuda.max_memory_allocated() / 2**30:.3f} GiB", flush=True)
