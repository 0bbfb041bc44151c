"""quickstart/scaling.py: what it runs and in which order, what it does when a run fails, its table."""

import shlex
import shutil
import sys
from pathlib import Path

import figures
import pytest
import scaling
import study_runs
import tyro
from conftest import REPOSITORY, read_csv

# run.sh of the tests: notes how it was called, and "runs" by copying a report made beforehand
STAND_IN = """#!/usr/bin/env bash
name=data
while (($#)); do
    case $1 in
        --data-only) ;;
        --continue) continue=yes ;;
        --size) size=$2; shift ;;
        --seed) name=$size-$2; shift ;;
        --posts-seed) posts=$2; shift ;;
        *) echo "unknown $1"; exit 9 ;;
    esac
    shift
done
[[ $name == data || $continue ]] || exit 8
name=$posts/$name
echo "$name" >>calls
if [[ -e behave ]]; then source behave; fi
[[ $name != */data ]] || exit 0
mkdir -p runs/quickstart/posts-$posts/report/nano-$size # cp alone would race with another one
cp -r "ready/$name/." runs/quickstart/posts-$posts
"""
POLICIES = {"rougeL": 0.3, "truth": 0.5, "win_rate": 0.5, "win_rate_low": 0.4, "win_rate_high": 0.6, "words": 20}
FACTS = {f"{kind}_{x}": 0.4 for kind in ("age", "feeling", "question") for x in ("right", "wrong")}
REPORT = {
    **{row: POLICIES | FACTS | {"tokens": 24.04, "eos_rate": 0.99} for row in ("SFT", "PPO", "DPO")},
    **{row: POLICIES for row in ("near_perfect", "copied_title", "reference")},
    **{f"{row}-SFT": {f"truth_difference{x}": 0.1 for x in ("", "_low", "_high")} for row in ("PPO", "DPO")},
    **{row: {f"accuracy_{x}": 0.7 for x in ("noisy", "clean", "noisy_cnndm", "clean_cnndm")}
       for row in ("reward", "dpo_implicit")},
}  # fmt: skip


class Clone:
    """A repository with the stand-in for run.sh, whose runs are made by `prepare`."""

    def __init__(self, folder: Path):
        self.root = folder
        self.runs = folder / "runs/quickstart"
        self.output = folder / "quickstart/results/nano"
        (folder / "quickstart").mkdir()
        (folder / "quickstart/run.sh").write_text(STAND_IN)

    def prepare(self, size: str, seed: int, posts: int = 1, **changes: float | None):
        """What a run leaves behind; changes are PPO__win_rate=0.7 and the like, None leaves a metric out."""
        ready = self.root / f"ready/{posts}/{size}-{seed}"
        report = {row: dict(metrics) for row, metrics in REPORT.items()}
        report["PPO"]["share_of_near_perfect"] = 0.9
        for name, value in changes.items():
            report[name.split("__")[0]][name.split("__")[1]] = value
        values = [(row, metric, value) for row in report for metric, value in report[row].items()]
        lines = [f"{row},{metric},{value}\n" for row, metric, value in values if value is not None]
        folder = ready / f"report/nano-{size}/{seed}"
        folder.mkdir(parents=True)
        (folder / "table.csv").write_text("row,metric,value\n" + "".join(lines))
        (folder / "times.csv").write_text("stage,seconds\nsft,10.25\nreward,20\nppo,100\ndpo,5\n")

    def prepare_all(self, sizes=("xs", "s"), seeds=(1, 2), posts_seeds=(1,)):
        for posts in posts_seeds:
            for size in sizes:
                for seed in seeds:
                    self.prepare(size, seed, posts)

    def main(self, sizes=("xs", "s"), seeds=(1, 2), **arguments):
        scaling.main(scaling.Args(sizes=sizes, seeds=seeds, **arguments))

    def new_calls(self) -> list[str]:
        """Names of the calls of run.sh since this was asked last, in order: 1/data, 1/xs-7."""
        path = self.root / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Clone:
    monkeypatch.setattr(scaling, "ROOT", tmp_path)
    return Clone(tmp_path)


def cells(text: str, *names) -> list[str]:
    """The cells behind the first ones, given by name, of a table's one row that begins with them."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    found = [row[len(names) :] for row in rows if row[: len(names)] == [*map(str, names)]]
    assert len(found) == 1, (names, found)
    return found[0]


# ---- what runs ------------------------------------------------------------------------------------------------------


def test_dry_run_prints_the_commands_in_order_and_does_nothing(clone, capsys):
    clone.prepare_all(("xs", "s", "m"), (7, 3), (2, 1))
    shutil.copytree(clone.root / "ready/2/s-7", clone.runs / "posts-2")  # finished
    before = sorted(clone.root.rglob("*"))
    clone.main(("xs", "s", "m"), (7, 3), posts_seeds=(2, 1), jobs=1, dry_run=True)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "# 1 of 12 runs are finished"
    command = f"OMP_NUM_THREADS={study_runs.cores()} bash quickstart/run.sh"
    runs = [(2, "m", 7), (2, "m", 3), (2, "s", 3), (2, "xs", 7), (2, "xs", 3)]
    runs += [(1, size, seed) for size in ("m", "s", "xs") for seed in (7, 3)]
    expected = [f"{command} --data-only --posts-seed {posts}" for posts in (2, 1)]
    expected += [f"{command} --continue --size {size} --seed {seed} --posts-seed {posts}" for posts, size, seed in runs]
    assert lines == expected
    assert sorted(clone.root.rglob("*")) == before
    flags = {word for line in lines for word in line.split() if word.startswith("--")}
    assert all(flag in (REPOSITORY / "quickstart/run.sh").read_text() for flag in flags)


def test_finished_runs_are_not_started_again_and_unfinished_are(clone, capsys):
    clone.prepare_all()
    shutil.copytree(clone.root / "ready/1/s-2", clone.runs / "posts-1")
    (clone.runs / "posts-1/report/nano-xs/1").mkdir(parents=True)  # a report without table.csv
    clone.main(jobs=1)
    assert clone.new_calls() == ["1/data", "1/s-1", "1/xs-1", "1/xs-2"]
    assert "run.sh --continue --size xs --seed 1" in (clone.runs / "posts-1/logs/nano-xs-1.log").read_text()
    assert "4/4 runs" in capsys.readouterr().err  # the one from before counts as well

    written = {path.name: path.read_bytes() for path in clone.output.iterdir()}
    shutil.rmtree(clone.output)
    clone.main(jobs=1)  # nothing is left to run; the same is written
    assert clone.new_calls() == []
    assert {path.name: path.read_bytes() for path in clone.output.iterdir()} == written
    assert sorted(written) == ["runs.csv", "table.md", "times.csv"]
    command = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("figures: python eval/figures.py"))
    asked = {"models": ("nano-xs", "nano-s"), "seeds": (1, 2), "runs": "runs/quickstart/posts-1"}
    asked |= {"judge": "quickstart/truth.py:score", "output_dir": "quickstart/results/nano"}
    assert tyro.cli(figures.Args, args=command) == figures.Args(**asked)


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def test_a_failing_run_stops_no_other_and_there_is_no_table(clone):
    """Nor is a run started whose data could not be made."""
    clone.prepare_all(posts_seeds=(1, 2))
    (clone.root / "behave").write_text("[[ $name != 1/data && $name != 2/s-1 ]] || exit 4\n")
    with pytest.raises(SystemExit, match=r"^error: posts-1 data, posts-2 nano-s 1 failed, so that no table is written"):
        clone.main(posts_seeds=(1, 2), jobs=1)
    assert clone.new_calls() == ["1/data", "2/data", "2/s-1", "2/s-2", "2/xs-1", "2/xs-2"]
    assert not clone.output.exists()
    (clone.root / "behave").unlink()
    clone.main(posts_seeds=(1, 2), jobs=1)
    assert clone.new_calls() == ["1/data", "2/data", "1/s-1", "1/s-2", "1/xs-1", "1/xs-2", "2/s-1"]
    assert (clone.output / "table.md").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seeds": (1, 2, 1)}, "--seeds is (1, 2, 1); it must name one or more, each once"),
        ({"jobs": 0}, "--jobs is 0"),
        ({"runs": "elsewhere"}, "run.sh writes to runs/quickstart only"),
    ],
)
def test_bad_arguments(clone, arguments, words):
    with pytest.raises(SystemExit, match="^error: ") as error:
        clone.main(**arguments)
    assert words in str(error.value) and clone.new_calls() == [] and not clone.output.exists()


def test_a_report_of_another_version(clone):
    clone.prepare_all(seeds=(1,))
    clone.prepare("xs", 2)
    clone.prepare("s", 2, PPO__eos_rate=None)
    with pytest.raises(SystemExit, match="^error: .*s/2/table.csv does not have PPO eos_rate; remove"):
        clone.main()
    assert not clone.output.exists()


# ---- table ----------------------------------------------------------------------------------------------------------


def test_numbers(clone, capsys, monkeypatch):
    good = {"PPO__win_rate": 0.65, "SFT__win_rate": 0.55, "PPO__truth": 0.8, "DPO__truth": 0.51}
    good |= {"PPO__share_of_near_perfect": 0.8, "reward__accuracy_clean": 0.85, "PPO__eos_rate": 0.95}
    bad = {"PPO__win_rate": 0.64, "SFT__win_rate": 0.541, "PPO-SFT__truth_difference_low": 0, "DPO__truth": 0.5}
    bad |= {"PPO__share_of_near_perfect": 0.79, "reward__accuracy_clean": 0.84, "PPO__eos_rate": 0.94}
    for seed, rouge in ((1, 0.1), (2, 0.2), (3, 0.6)):  # mean 0.3, sample sd 0.26458, population sd 0.21602
        clone.prepare("xs", seed, SFT__rougeL=rouge, PPO__win_rate=0.66, PPO__tokens=20 + seed)
        clone.prepare("s", seed, SFT__rougeL=0.301, reward__accuracy_noisy=0.71, **(good if seed > 1 else bad))
        clone.prepare("m", seed, SFT__rougeL=0.302, reward__accuracy_noisy=0.705, PPO__win_rate=0.7)
        for size in ("xs", "s", "m"):
            clone.prepare(size, seed, posts=4, SFT__rougeL=0.9)
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--seeds", "1", "2", "3"])
    clone.main(("m", "xs", "s"), (1, 2, 3), posts_seeds=(1, 4))
    text = (clone.output / "table.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.partition("\nfigures: ")[0] == text
    assert text.startswith("`python quickstart/scaling.py --seeds 1 2 3`\n") and "cores, 2 runs side by side" in text
    first, second = text.split("## Posts seed ")[1:]
    assert first[0] == "1" and second[0] == "4"

    # over seeds: the sizes go from small to large
    assert "| xs (n = 3) | s (n = 3) | m (n = 3) |" in first
    quantities, gains, runs, checks = first.strip().split("\n\n")[1:]
    assert cells(quantities, "SFT rougeL") == ["0.300 ± 0.265", "0.301 ± 0.000", "0.302 ± 0.000"]
    assert cells(quantities, "PPO tokens") == ["22.0 ± 1.0", "24.0 ± 0.0", "24.0 ± 0.0"]
    assert cells(quantities, "near_perfect words") == ["20.0 ± 0.0"] * 3
    assert cells(second.split("\n\n")[1], "SFT rougeL") == ["0.900 ± 0.000"] * 3
    # gains are taken seed by seed: of 0.301 over 0.1, 0.2 and 0.6, and of 0.64, 0.65 and 0.65 over 0.66
    assert cells(gains, "gain, seed by seed") == ["s − xs", "m − s", "m − xs"]
    assert cells(gains, "SFT rougeL") == ["0.001 ± 0.265", "0.001 ± 0.000", "0.002 ± 0.265"]
    assert cells(gains, "PPO win_rate") == ["-0.013 ± 0.006", "0.053 ± 0.006", "0.040 ± 0.000"]
    assert cells(gains, "reward accuracy_noisy") == ["0.010 ± 0.000", "-0.005 ± 0.000", "0.005 ± 0.000"]
    # each run
    header = cells(runs, "size", "seed")
    assert dict(zip(header, cells(runs, "xs", 3), strict=True))["PPO tokens"] == "23.0"
    assert dict(zip(header, cells(runs, "s", 1), strict=True))["PPO win_rate"] == "0.640"
    assert cells(checks, "s", 1) == ["no"] * 7
    assert cells(checks, "s", 2) == ["yes"] * 7  # each threshold itself passes, float rounding of 0.65 - 0.55 included
    #                                  win rate, above SFT, interval, share, RM, EOS, DPO: 0.5 is not above 0.5
    assert cells(checks, "m", 1) == ["yes", "yes", "yes", "yes", "no", "yes", "no"]
    assert cells(checks, "yes", "") == ["8 of 9", "8 of 9", "8 of 9", "8 of 9", "2 of 9", "8 of 9", "2 of 9"]

    # runs.csv: the reports as they are
    rows = read_csv(clone.output / "runs.csv")
    assert list(rows[0]) == ["posts_seed", "size", "seed", "row", "metric", "value"]
    order = list(dict.fromkeys((row["posts_seed"], row["size"], row["seed"]) for row in rows))
    assert order == [(p, size, seed) for p in "14" for size in ("xs", "s", "m") for seed in "123"]
    of_run = [row for row in rows if (row["posts_seed"], row["size"], row["seed"]) == ("1", "s", "3")]
    table = read_csv(clone.runs / "posts-1/report/nano-s/3/table.csv")
    assert [{key: row[key] for key in ("row", "metric", "value")} for row in of_run] == table

    # times.csv: sums over the three seeds
    rows = [list(row.values()) for row in read_csv(clone.output / "times.csv")]
    stages = {"sft": "30.8", "reward": "60.0", "ppo": "300.0", "dpo": "15.0", "all stages": "405.8"}
    expected = [[p, size, x, "3", stages[x]] for p in "14" for size in ("xs", "s", "m") for x in stages]
    assert rows == expected


def test_one_size_and_one_seed_have_no_deviation_and_no_gain(clone):
    clone.prepare("s", 1, SFT__rougeL=0.25)
    clone.main(("s",), (1,))
    text = (clone.output / "table.md").read_text(encoding="utf-8")
    assert cells(text, "SFT rougeL") == ["0.250"] and "| s (n = 1) |" in text and "gain" not in text
