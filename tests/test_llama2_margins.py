"""llama2/margins.py: means and deviations over seeds against statistics.stdev, from hand-made run folders."""

import statistics
import sys
from pathlib import Path

import pandas
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llama2"))

import margins  # noqa: E402


def test_margins_are_means_over_seeds(tmp_path, capsys):
    accuracies = {("noisy", "none"): [0.5, 0.75, 0.625], ("noisy", "large"): [0.25, 0.5], ("true", "small"): [1.0, 0.5]}
    for (labels, margin), values in accuracies.items():
        for seed, value in enumerate(values):
            rows = [("validation", "overall", "all", 8, value, value - 1)]
            rows += [("validation", "grade", "better", 4, value / 2, 2 * value)]
            rows += [("validation", "confidence", "8", 4, 0.0, 0.0), ("test", "overall", "all", 8, 0.0, 0.0)]
            folder = tmp_path / "runs" / labels / margin / str(seed) / "eval"
            folder.mkdir(parents=True)
            columns = ["data", "group", "value", "pairs", "accuracy", "gap"]
            pandas.DataFrame(rows, columns=columns).to_csv(folder / "accuracy.csv", index=False)
    margins.main(margins.Args(runs=str(tmp_path / "runs"), output_dir=str(tmp_path / "out")))
    table = pandas.read_csv(tmp_path / "out" / "margins.csv")
    found = {(row.labels, row.margin, row.grade): row for row in table.itertuples()}
    keys = [(*key, grade) for key in accuracies for grade in ("better", "all")]
    assert list(found) == keys
    for key, values in accuracies.items():
        for grade, hits, gaps, pairs in (
            ("all", values, [x - 1 for x in values], 8),
            ("better", [x / 2 for x in values], [2 * x for x in values], 4),
        ):
            row = found[*key, grade]
            assert (row.runs, row.pairs) == (len(values), pairs)
            expected = [statistics.mean(hits), statistics.stdev(hits), statistics.mean(gaps), statistics.stdev(gaps)]
            assert [row.accuracy, row.accuracy_sd, row.gap, row.gap_sd] == pytest.approx(expected, abs=6e-5)
    text = (tmp_path / "out" / "margins.md").read_text()
    assert "| margin | better (4) | all (8) |" in text and "| large (2 seeds) | 0.188 ± 0.088 | 0.375 ± 0.177 |" in text
    assert text in capsys.readouterr().out and (tmp_path / "out" / "margins.png").stat().st_size > 10_000


def test_without_runs_one_message(tmp_path):
    with pytest.raises(SystemExit, match="no run in .*: bash llama2/margins.sh trains them"):
        margins.main(margins.Args(runs=str(tmp_path), output_dir=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()
