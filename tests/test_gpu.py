"""benchmark/gpu.sh, all of its parts on a CPU; and its arithmetic."""

import subprocess
from pathlib import Path

import gpu
import pytest
from conftest import read_csv

ROOT = Path(__file__).resolve().parents[1]


def test_a_step_reads_what_1b_has():
    """128 KiB of keys and values a token; 12 x 16 x 2048^2 weights in the layers, 2048 x 50,304 in the head."""
    shape = (2048, 16, 8, 50304)
    assert gpu.step_bytes(256, 565, shape, 2) - gpu.step_bytes(0, 565, shape, 2) == 256 * 565 * 128 * 1024
    assert gpu.step_bytes(0, 565, shape, 2) == 2 * (805_306_368 + 103_022_592)


@pytest.mark.long
def test_all_parts_on_a_cpu(tmp_path, record_property):
    command = ["bash", "benchmark/gpu.sh", "--device", "cpu", "--tiny", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert len(list(tmp_path.iterdir())) <= 8
    found = {row["what"]: float(row["found"]) for row in read_csv(tmp_path / "correctness.csv")}
    for what, value in found.items():
        if "abs(ratio - 1)" in what or "KL of the first" in what:
            assert value == 0
        record_property("gpu", [what, f"{value:g}"])
    [resumed] = [what for what in found if what.startswith("killed, resumed from update ")]
    assert found[resumed] == 0 and int(resumed.split()[4]) in (1, 2, 3)
    [tokens] = [value for what, value in found.items() if what.startswith("float32: rows of 64 whose tokens")]
    assert tokens == 64
    stages = {row["stage"]: row for row in read_csv(tmp_path / "stages.csv")}
    assert set(stages) == {"sft", "reward", "ppo", "dpo"}
    for row in stages.values():
        assert float(row["items/s"]) == pytest.approx(16 / float(row["seconds"]), rel=0.05)
        assert 0 < float(row["share of a matrix product in training"]) < 1.5
    decoding = read_csv(tmp_path / "decoding.csv")
    assert [row["rows"] for row in decoding] == ["8", "16"]  # and no graph without a GPU
    page = (tmp_path / "page.md").read_text()
    assert "Did not end" not in page and all(row["seconds"] in page for row in stages.values())
