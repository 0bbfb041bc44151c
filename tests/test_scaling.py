"""quickstart/scaling.py: which commands it runs in which order, what it does when a run fails, and its table."""

import itertools
import re
import shutil
from pathlib import Path

import pytest
import scaling
from conftest import REPOSITORY, files, read_csv


class Clone:
    """A folder in which a run copies the report that `prepare` made, unless its name is in .failing; .calls are the
    names of the jobs that ran: 1/data, 1/xs-7."""

    def __init__(self, folder: Path):
        self.root, self.calls, self.failing = folder, [], set()
        self.runs = folder / "runs/quickstart"
        self.output = folder / "quickstart/results/nano"

    def run_jobs(self, jobs, side_by_side, root):
        """In place of study_runs.run_jobs."""
        for job in jobs:
            posts, *run = re.findall(r"posts-(\d+)|nano-(\w+) (\d+)", job.name)
            name = f"{posts[0]}/{'-'.join(run[0][1:]) if run else 'data'}"
            self.calls.append(name)
            if run and name not in self.failing:
                shutil.copytree(self.root / "ready" / name, self.runs / f"posts-{posts[0]}", dirs_exist_ok=True)
        if self.failing & set(self.calls):
            raise SystemExit("error: failed")

    def prepare(self, size: str, seed: int, posts: int = 1, **changes: float):
        """The files that a run leaves behind; PPO__win_rate=0.7 sets a metric."""
        values = dict.fromkeys(scaling.QUANTITIES, 0.4)
        values |= {name.replace("__", " "): value for name, value in changes.items()}
        lines = [f"{name.replace(' ', ',')},{value}\n" for name, value in values.items()]
        folder = self.root / f"ready/{posts}/{size}-{seed}/report/nano-{size}/{seed}"
        folder.mkdir(parents=True)
        (folder / "table.csv").write_text("row,metric,value\n" + "".join(lines))
        (folder / "times.csv").write_text("stage,seconds\nsft,10.25\nreward,20\nppo,100\ndpo,5\n")

    def main(self, sizes=("xs", "s"), seeds=(1, 2), **arguments):
        scaling.main(scaling.Args(sizes=sizes, seeds=seeds, **arguments))


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Clone:
    found = Clone(tmp_path)
    monkeypatch.setattr(scaling, "ROOT", tmp_path)
    monkeypatch.setattr(scaling, "run_jobs", found.run_jobs)
    return found


def cells(text: str, *names) -> list[str]:
    """The remaining cells of the one row whose first cells have these names."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    found = [row[len(names) :] for row in rows if row[: len(names)] == [*map(str, names)]]
    assert len(found) == 1, (names, found)
    return found[0]


def test_dry_run_prints_the_commands_in_order_and_does_nothing(clone, capsys):
    clone.prepare("s", 7, posts=2)
    shutil.copytree(clone.root / "ready/2/s-7", clone.runs / "posts-2")  # finished
    clone.main(("xs", "s"), (7, 3), posts_seeds=(2, 1), jobs=1, dry_run=True)
    _, *lines = capsys.readouterr().out.splitlines()
    runs = [(2, "s", 3), (2, "xs", 7), (2, "xs", 3), (1, "s", 7), (1, "s", 3), (1, "xs", 7), (1, "xs", 3)]
    expected = [f"--data-only --posts-seed {posts}" for posts in (2, 1)]
    expected += [f"--continue --size {size} --seed {seed} --posts-seed {posts}" for posts, size, seed in runs]
    assert [line.partition("quickstart/run.sh ")[2] for line in lines] == expected and clone.calls == []
    flags = {word for line in expected for word in line.split() if word.startswith("--")}
    assert all(flag in (REPOSITORY / "quickstart/run.sh").read_text() for flag in flags)


def test_a_failing_run_stops_no_other_and_there_is_no_table(clone):
    """The next call runs what is not finished, and a third call nothing."""
    for posts, size, seed in itertools.product((1, 2), ("xs", "s"), (1, 2)):
        clone.prepare(size, seed, posts)
    (clone.runs / "posts-1/report/nano-xs/1").mkdir(parents=True)  # a report without table.csv is not finished
    clone.failing = {"2/s-1"}
    with pytest.raises(SystemExit, match="^error: failed"):
        clone.main(posts_seeds=(1, 2), jobs=1)
    ran = ["1/s-1", "1/s-2", "1/xs-1", "1/xs-2", "2/s-1", "2/s-2", "2/xs-1", "2/xs-2"]
    assert clone.calls == ["1/data", "2/data", *ran] and not clone.output.exists()
    clone.failing, clone.calls = set(), []
    clone.main(posts_seeds=(1, 2), jobs=1)
    assert clone.calls == ["2/data", "2/s-1"]
    written, clone.calls = files(clone.output), []
    clone.main(posts_seeds=(1, 2), jobs=1)
    assert clone.calls == [] and files(clone.output) == written
    assert sorted(written) == ["runs.csv", "table.md", "times.csv"]


def test_bad_arguments(clone):
    with pytest.raises(SystemExit, match="^error: --seeds is"):
        clone.main(seeds=(1, 2, 1))
    assert clone.calls == [] and not clone.output.exists()


def test_numbers(clone):
    """Means and deviations over seeds, gains between sizes of the same seed, and summed times."""
    for seed, rouge in ((1, 0.1), (2, 0.2), (3, 0.6)):  # mean 0.3, sample sd 0.26458, population sd 0.21602
        clone.prepare("xs", seed, SFT__rougeL=rouge, PPO__win_rate=0.66)
        clone.prepare("s", seed, SFT__rougeL=0.301, PPO__win_rate=0.65 if seed > 1 else 0.64)
        for size in ("xs", "s"):
            clone.prepare(size, seed, posts=4, SFT__rougeL=0.9)
    clone.main(("xs", "s"), (1, 2, 3), posts_seeds=(1, 4))
    first, second = (clone.output / "table.md").read_text(encoding="utf-8").split("## Posts seed ")[1:]
    quantities, gains, runs = first.strip().split("\n\n")[1:]
    assert cells(quantities, "SFT rougeL") == ["0.300 ± 0.265", "0.301 ± 0.000"]
    assert cells(second.split("\n\n")[1], "SFT rougeL") == ["0.900 ± 0.000"] * 2
    # of 0.301 over 0.1, 0.2 and 0.6, and of 0.64, 0.65 and 0.65 over 0.66
    assert cells(gains, "SFT rougeL") == ["0.001 ± 0.265"] and cells(gains, "PPO win_rate") == ["-0.013 ± 0.006"]
    header = cells(runs, "size", "seed")
    assert dict(zip(header, cells(runs, "s", 1), strict=True))["PPO win_rate"] == "0.640"
    rows = read_csv(clone.output / "runs.csv")  # the reports as they are
    of_run = [row for row in rows if (row["posts_seed"], row["size"], row["seed"]) == ("1", "s", "3")]
    table = read_csv(clone.runs / "posts-1/report/nano-s/3/table.csv")
    assert [{key: row[key] for key in ("row", "metric", "value")} for row in of_run] == table
    rows = [list(row.values()) for row in read_csv(clone.output / "times.csv")]  # sums over the three seeds
    stages = {"sft": "30.8", "reward": "60.0", "ppo": "300.0", "dpo": "15.0", "all stages": "405.8"}
    assert rows == [[p, size, x, "3", stages[x]] for p in "14" for size in ("xs", "s") for x in stages]


def test_one_size_and_one_seed_have_no_deviation_and_no_gain(clone):
    clone.prepare("s", 1, SFT__rougeL=0.25)
    clone.main(("s",), (1,))
    text = (clone.output / "table.md").read_text(encoding="utf-8")
    assert cells(text, "SFT rougeL") == ["0.250"] and "gain" not in text
