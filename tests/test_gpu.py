"""benchmark/speed/gpu.py: its parts on a CPU, and its arithmetic."""

import gpu
import pytest
import torch
from conftest import read_csv


def test_queries_are_of_mixed_lengths_and_padded_on_the_left():
    queries = gpu.random_queries(8, 32, 99)
    lengths = (queries != 99).sum(1).tolist()
    assert min(lengths) == 8 and max(lengths) == 32 and len(set(lengths)) == 8
    for row, length in zip(queries.tolist(), lengths, strict=True):
        assert row[: 32 - length] == [99] * (32 - length) and min(row) > 0


def test_without_a_gpu_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch finds no GPU"):
        gpu.main(gpu.Args("device", str(tmp_path)))


@pytest.mark.long
def test_all_parts_on_a_cpu(tmp_path, record_property):
    for part in ("device", "decoding", "correctness"):
        gpu.main(gpu.Args(part, str(tmp_path), "cpu", str(tmp_path / "work")))
    found = {row["what"]: float(row["found"]) for row in read_csv(tmp_path / "correctness.csv")}
    for what, value in found.items():
        if "abs(ratio - 1)" in what or "KL of the first" in what:
            assert value == 0
        record_property("gpu", [what, f"{value:g}"])
    [resumed] = [what for what in found if what.startswith("killed, resumed from update ")]
    assert found[resumed] == 0 and int(resumed.split()[4]) in (1, 2, 3)
    [tokens] = [value for what, value in found.items() if what.startswith("float32: rows of 64 whose tokens")]
    assert tokens == 64
    assert [row["rows"] for row in read_csv(tmp_path / "decoding.csv")] == ["8", "16"]
