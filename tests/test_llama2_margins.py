"""llama2/margins.py: means and deviations over seeds against statistics.stdev, from hand-made run folders; and the
commands of llama2's shell scripts."""

import os
import shlex
import shutil
import statistics
import subprocess
from pathlib import Path

import pandas
import pytest
import tyro
from conftest import ROOT, script

margins = script("llama2/margins.py")
# in place of what the scripts call: a note of the command, and nothing is installed or made
STUBS = """
python() { [[ $1 == - ]] && cat >/dev/null; printf '%s\\n' "$(printf '%q ' "$@")" >>"$COMMANDS"; }
source() { :; }
bash() { :; }
cp() { :; }
cat() { :; }
export -f python source bash cp cat
"""


def commands(name: str, folder: Path, *given: str, place: str = ".") -> list[tuple]:
    """(script, its Args) of every command that llama2/{name} gives; an unknown flag or a wrong type exits. It is called
    from the subfolder `place`."""
    (folder / "llama2").mkdir()
    shutil.copy(ROOT / "llama2" / name, folder / "llama2")
    environment = os.environ | {"COMMANDS": str(folder / "commands")}
    command = ["bash", "-c", f'{STUBS}command bash "$@"', "-", str(folder / "llama2" / name), *given]
    subprocess.run(command, cwd=folder / place, env=environment, check=True, capture_output=True)
    found = [shlex.split(line) for line in (folder / "commands").read_text().splitlines()]
    own = [words for words in found if words[0] not in ("-", "llama2/rounds.py")]
    return [(words[0], tyro.cli(script(words[0]).Args, args=words[1:])) for words in own]


@pytest.mark.parametrize("name", ["margins.sh", "real_sets.sh"])
def test_each_command_reads_what_those_before_it_wrote(name, tmp_path):
    found, written = commands(name, tmp_path), set()
    for script_name, args in found:
        flags = ("base", "sft_model_path", "preference_dataset", "reward_model_paths")
        read = [getattr(args, flag, None) or [] for flag in flags] + [args.model if script_name == "sft.py" else []]
        for path in [path for x in read for path in (x if isinstance(x, list) else [x])]:
            assert path in written or (ROOT / path).exists(), (script_name, path)
        folders = ("/base", "/sft", "/preference") if script_name == "llama2/preference_dataset.py" else ("",)
        written |= {args.output_dir + folder for folder in folders}
    runs = {args.output_dir: (args.margin, args.seed) for path, args in found if path == "llama2/reward.py"}
    if name == "margins.sh":
        assert all(folder.endswith(f"/{margin}/{seed}") for folder, (margin, seed) in runs.items())
        assert len(runs) == len(margins.LABELS) * len(margins.COLORS) * 4
    else:
        assert [margin for margin, _ in runs.values()] == ["small", "small", "none"]
        helpfulness, _, safety = runs
        assert found[-1][1].reward_combination == "safety_gate"
        assert found[-1][1].reward_model_paths == [helpfulness, safety]


def test_real_sets_takes_folders_as_seen_from_where_it_is_called(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    found = commands("real_sets.sh", tmp_path, "sets", "out", place="elsewhere")
    assert found[0][1].tokenizer == f"{tmp_path}/elsewhere/sets/tokenizer"
    assert (tmp_path / "elsewhere/out").is_dir()


@pytest.mark.parametrize("given", [["ture"], []], ids=["unknown labels", "another commit"])
def test_margins_refuses_before_any_run(tmp_path, given):
    (tmp_path / "llama2").mkdir()
    shutil.copy(ROOT / "llama2/margins.sh", tmp_path / "llama2")
    stubs = STUBS.replace("python() {", "python() { [[ $2 != one-commit ]] || exit 1;")
    environment = os.environ | {"COMMANDS": str(tmp_path / "commands")}
    command = ["bash", "-c", f'{stubs}command bash llama2/margins.sh "$@"', "-", *given]
    assert subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True).returncode == 1
    assert not (tmp_path / "commands").exists()


def test_margins_are_means_over_seeds(tmp_path):
    accuracies = {("noisy", "none"): [0.5, 0.75, 0.625], ("noisy", "large"): [0.25, 0.5], ("true", "small"): [1.0, 0.5]}
    expected = []
    for (labels, margin), values in accuracies.items():
        for seed, value in enumerate(values):
            rows = [("validation", "overall", "all", 8, value, value - 1)]
            rows += [("validation", "grade", "better", 4, value / 2, 2 * value)]
            rows += [("validation", "confidence", "8", 4, 0.0, 0.0), ("test", "overall", "all", 8, 0.0, 0.0)]
            folder = tmp_path / "runs" / labels / margin / str(seed) / "eval"
            folder.mkdir(parents=True)
            columns = ["data", "group", "value", "pairs", "accuracy", "gap"]
            pandas.DataFrame(rows, columns=columns).to_csv(folder / "accuracy.csv", index=False)
        mean, sd, runs = statistics.mean(values), statistics.stdev(values), len(values)
        expected.append([labels, margin, "better", runs, 4, mean / 2, sd / 2, 2 * mean, 2 * sd])
        expected.append([labels, margin, "all", runs, 8, mean, sd, mean - 1, sd])
    margins.main(margins.Args(runs=str(tmp_path / "runs"), output_dir=str(tmp_path / "out")))
    table = pandas.read_csv(tmp_path / "out" / "margins.csv").values.tolist()
    assert [row[:5] for row in table] == [row[:5] for row in expected]
    assert [row[5:] for row in table] == [pytest.approx(row[5:], abs=6e-5) for row in expected]
    assert (tmp_path / "out" / "margins.png").stat().st_size > 10_000
