"""benchmark/speed/gpu.sh, all of its parts on a CPU; and its arithmetic."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import gpu
import pytest
import throughput
import torch
from conftest import read_csv

ROOT = Path(__file__).resolve().parents[1]


def test_a_step_reads_what_1b_has():
    """128 KiB of keys and values a token; 12 x 16 x 2048^2 weights in the layers, 2048 x 50,304 in the head."""
    shape = (2048, 16, 8, 50304)
    assert gpu.step_bytes(256, 565, shape, 2) - gpu.step_bytes(0, 565, shape, 2) == 256 * 565 * 128 * 1024
    assert gpu.step_bytes(0, 565, shape, 2) == 2 * (805_306_368 + 103_022_592)


def test_training_of_an_update_by_hand():
    """512 episodes of 512 + 53 tokens at 1b: 4 epochs forward and backward through two bodies and one head."""
    body = 2 * 12 * 16 * 2048**2 * 565 + 4 * 16 * 2048 * 565**2 / 2
    head = 2 * 50304 * 2048 * 53
    assert round(512 * 12 * (2 * body + head) / 1e15, 1) == gpu.TRAINING_PFLOP


def test_queries_are_of_mixed_lengths_and_padded_on_the_left():
    queries = gpu.random_queries(8, 32, 99)
    lengths = (queries != 99).sum(1).tolist()
    assert min(lengths) == 8 and max(lengths) == 32 and len(set(lengths)) == 8
    for row, length in zip(queries.tolist(), lengths, strict=True):
        assert row[: 32 - length] == [99] * (32 - length) and min(row) > 0


def test_the_largest_number_is_nan_if_one_is():
    for values in ([1.0, float("nan"), 2.0], [float("nan"), 1.0], [1.0, float("nan")]):
        assert torch.tensor(gpu.largest(values)).isnan()
    assert gpu.largest(x for x in (1.0, 3.0, 2.0)) == 3


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The part ppo with a program in place of ppo.py, which writes these lines of metrics and what follows them."""
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(throughput.SHAPES, device, throughput.SHAPES[device])
    monkeypatch.setattr(throughput, "work_done", lambda args, work, response: (390.0, 1e9))
    monkeypatch.chdir(tmp_path)  # main goes elsewhere
    args = gpu.Args("ppo", str(tmp_path / "out"), device="cpu", tiny=True, work=str(tmp_path / "work"), limit=17)
    Path(args.output_dir).mkdir()
    gpu.write(args, "device", [{"TFLOP/s of a product": "1"}])

    def run(lines: list[dict], last: str) -> tuple[int, list[dict], str]:
        """Exit code, stages.csv and the page."""
        folder = tmp_path / "work" / "tiny" / "runs" / "ppo"
        text = "".join(json.dumps(line) + "\n" for line in lines)
        program = f"import os, time; os.mkdir({str(folder)!r}); file = open({str(folder / 'metrics.jsonl')!r}, 'w')\n"
        program += f"file.write({text!r}); file.write('{{\"upd'); file.flush()\n{last}"
        monkeypatch.setattr(throughput, "stage_command", lambda *_: [sys.executable, "-c", program])
        code = 0
        try:
            gpu.main(args)
        except SystemExit as ended:
            code = ended.code
        found = gpu.read(args, "stages")
        return code, found, Path(args.output_dir, "page.md").read_text()

    return run


def line(update: int, **changes) -> dict:
    times = {"time/sampling": 1, "time/rollout": 3, "time/update": 10, "time/total": 4 + 10.0 * update}
    others = {"response/length": 37, "policy/first_ratio_deviation": 0, "objective/kl": 0}
    return {"update": update, **times, **others} | changes


def test_a_run_that_ends_is_timed_after_its_warmup(fake):
    code, [row], page = fake([line(1), line(2)], "")
    assert code == 0 and "Failed" not in page
    assert (row["updates"], row["seconds"], row["items/s"]) == ("2 of 2", "10.00", "1.60")
    assert row["phases, s"].startswith("sampling 1.00, scoring 2.00, update 7.00; abs(ratio - 1) 0,")
    assert float(row["peak GiB"]) > 0


@pytest.mark.parametrize(
    ("lines", "last", "told"),
    [
        ([line(1)], "time.sleep(60)", "ppo was cut off after 2 s with 1 of 2 updates"),
        ([line(1, **{"policy/first_ratio_deviation": float("nan")}), line(2)], "", "of update 1 is nan"),
        ([line(1), line(2)], "raise SystemExit(3)", "ended with exit code 3 after 2 of 2 updates"),
    ],
)
def test_a_run_that_does_not_end_well_fails_and_leaves_its_updates(fake, lines, last, told):
    code, [row], page = fake(lines, last)
    assert code == 1 and told in page and row["updates"] == f"{len(lines)} of 2"


def test_the_page_of_the_h100_is_made_from_its_tables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # main goes elsewhere
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kept = ROOT / "benchmark/results/h100"
    for file in kept.glob("*.csv"):
        shutil.copy(file, tmp_path)
    gpu.main(gpu.Args("page", str(tmp_path)))
    assert (tmp_path / "page.md").read_text() == (kept / "page.md").read_text()
    with pytest.raises(SystemExit, match="torch finds no GPU"):
        gpu.main(gpu.Args("device", str(tmp_path)))


@pytest.mark.long
def test_all_parts_on_a_cpu(tmp_path, record_property):
    command = ["bash", "benchmark/speed/gpu.sh", "--device", "cpu", "--tiny", tmp_path]
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
    assert [row["rows"] for row in decoding] == ["8", "16"]
    page = (tmp_path / "page.md").read_text()
    assert "Failed" not in page and all(row["seconds"] in page for row in stages.values())
