"""What a reader has to read: lines of the stage scripts and of README.md, of `ppo.py` to the end of `main`, of the
common block, and how far a copy for another paper is from what it copies. `python tests/test_sizes.py` prints them
beside their limits."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {
    "ppo.py: lines": 940,
    "ppo.py: characters": 56_000,
    "ppo.py: last line of main": 480,
    "reward.py: lines": 670,
    "dpo.py: lines": 660,
    "sft.py: lines": 480,
    "tldr_dataset.py: lines": 600,
    "plumbing: lines": 230,
    "README.md: lines": 250,
    "ppo.py to ensembles/ppo.py: lines of the diff": 380,
    "reward.py to llama2/reward.py: lines of the diff": 220,
}


def diff_lines(script: str, copy: str) -> int:
    """Lines added and removed."""
    command = ["git", "diff", "--no-index", "--shortstat", script, copy]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    return sum(int(count) for count in re.findall(r"(\d+) (?:insertion|deletion)", said))


def sizes() -> dict[str, int]:
    """The numbers of LIMITS, as they are."""
    found = {}
    for name in LIMITS:
        file, _, what = name.partition(": ")
        if what == "lines of the diff":
            found[name] = diff_lines(*file.split(" to "))
            continue
        text = (ROOT / ("ppo.py" if file == "plumbing" else file)).read_text()
        if file == "plumbing":
            text = text[text.index("# ==== plumbing") :]
        if what == "last line of main":  # up to the rule of the next section
            text = text[: text.index("# ====", text.index("\ndef main("))].rstrip() + "\n"
        found[name] = len(text) if what == "characters" else text.count("\n")
    return found


@pytest.mark.parametrize("name", LIMITS)
def test_size(name):
    assert 0 < sizes()[name] <= LIMITS[name]


if __name__ == "__main__":
    for name, size in sizes().items():
        print(f"{name:<50} {size:>6,} of {LIMITS[name]:>6,}")
