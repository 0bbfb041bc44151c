"""The READMEs against the repository: links lead somewhere, every link of the form [`snippet`](file#L12) to a line
that holds the snippet; every flag in a command or in backticks is one of its script's; the table of metrics has the
keys that the stage scripts write; the tables of speed are throughput.csv and, for the H100, results/h100 and plan.py; a
folder's README names its scripts.

`python tests/test_readme.py` rewrites lines and speed after an edit of the scripts or another measurement.
"""

import ast
import csv
import re
import shlex
from functools import cache
from pathlib import Path

import conftest
import plan
import pytest
from conftest import ROOT
from test_copies import OURS, STAGES

FOLDERS = ["quickstart", "benchmark", "eval", "ensembles", "llama2", "variants", "ablations", "tests"]
DOCUMENTS = ["README.md", *(f"{folder}/README.md" for folder in FOLDERS), "quickstart/bases/README.md"]
DOCUMENTS += [f"docs/{name}.md" for name in ("details", "kl", "metrics", "papers", "runs")]
DOCUMENTS += ["benchmark/pretrained.md"]
DETAILS = ROOT / "docs" / "details.md"
LINK = re.compile(r"\[`([^`]+)`\]\(\.\./([\w/.]+)#L(\d+)\)")
METRIC = re.compile(
    r"(loss|eval|accuracy|rewards|logprobs|other_logits|objective|response|policy|value|time|tokens)/\w+"
)
MADE = ["ppo_function.py", "simpo.py", "ppo_value.py", "ppo_short.py"]  # by the diffs of ablations/
NOT_OURS = {"--nodes", "--batch", "--signal"}  # Slurm's


def found_lines(snippet: str, file: str) -> list[int]:
    """1-based numbers of the lines of `file` that hold `snippet`."""
    lines = (ROOT / file).read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if snippet in line]


def test_links_point_at_the_lines_they_name():
    links = LINK.findall(DETAILS.read_text())
    wrong = [link for link in links if found_lines(link[0], link[1])[:1] != [int(link[2])]]
    assert not wrong, "run python tests/test_readme.py"
    assert len(links) >= 25


def test_all_25_details_have_a_row():
    rows = re.findall(r"^\| (\d+) \| .*$", DETAILS.read_text(), re.MULTILINE)
    assert [int(number) for number in rows] == list(range(1, 26))


def anchors(document: Path) -> set[str]:
    """What GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_pictures_exist(name):
    targets = re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text())
    for target in [target for target in targets if not target.startswith("http")]:
        file, _, anchor = target.partition("#")
        place = ROOT / Path(name).parent / file if file else ROOT / name
        assert place.exists(), target
        assert not anchor or re.fullmatch(r"L\d+", anchor) or anchor in anchors(place), target


@pytest.mark.parametrize("folder", FOLDERS[:-1])
def test_a_folder_names_its_scripts(folder):
    text = (ROOT / folder / "README.md").read_text()
    scripts = [script.removeprefix(f"{folder}/") for script in OURS if script.startswith(f"{folder}/")]
    assert (scripts or folder == "ablations") and not [script for script in scripts if f"]({script})" not in text]


@cache
def flags_of(script: str) -> set[str]:
    """What a script takes: the fields of Args, an argparse argument, or, of a shell script, what its text names."""
    text = conftest.script_path(script).read_text()
    if script.endswith(".sh"):
        return set(re.findall(r"--[a-z-]+", text))
    found = set(re.findall(r'add_argument\("(--[a-z-]+)"', text))
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            names = [x.target.id.replace("_", "-") for x in node.body if isinstance(x, ast.AnnAssign)]
            found |= {f"--{name}" for name in names} | {f"--no-{name}" for name in names}
    return found


def commands(text: str) -> list[list[str]]:
    """The words of every command of a script of ours, from the script's name on, in code blocks and in backticks; a
    copy that the page makes of a script counts as that script, and a variable that it sets as its value."""
    found, blocks = [], re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    spans = [
        span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    ]
    for block in [*blocks, *(span for span in spans if re.match(r"(python|bash|torchrun|accelerate launch) ", span))]:
        for copied, copy in re.findall(r"(?:^|`)cp (\S+) (\S+?)(?:`|$)", text, re.MULTILINE):
            block = re.sub(rf"^python {copy}", f"python {copied}", block, flags=re.MULTILINE)
        for name, value in re.findall(r'^(\w+)="(.*)"$', block, re.MULTILINE):
            block = block.replace(f"${name} ", f"{value} ")
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            scripts = [i for i, word in enumerate(words) if re.fullmatch(r"[\w/]+\.(py|sh)", word)]
            if scripts and re.match(r" *(\w+=\S+ )*(python|bash|torchrun|accelerate) (?!-m)", line):
                found.append(words[scripts[0] :])
    return found


def unknown_flags(text: str) -> list[str]:
    """Commands with a flag that their script lacks, and flags alone in backticks that no script has."""
    wrong = []
    for script, *words in commands(text):
        flags = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
        assert conftest.script_path(script).exists(), script
        wrong += [f"{script} {flag}" for flag in sorted(flags - flags_of(script))]
    scripts = [*OURS, *MADE, "quickstart/run.sh", "benchmark/pretrained.sh", "tests/undo_details.py"]
    known = NOT_OURS.union(*(flags_of(script) for script in scripts))
    for span in re.findall(r"`(--[a-z][^`]*)`", text):
        flags = {
            flag for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", span) if "_" not in flag
        }  # those are accelerate's
        wrong += sorted(flags - known)
    return wrong


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_flag_exists(name):
    text = (ROOT / name).read_text()
    assert unknown_flags(text) == []


def test_a_flag_that_is_gone_is_noticed():
    text = '```bash\nx="--seed 1"\npython sft.py $x --run-eval \\\n    --track\n```\n'
    text += "`--resume`, `--eval-only RUN`, `python dpo.py --oops`"
    assert unknown_flags(text) == ["sft.py --run-eval", "dpo.py --oops", "--eval-only"]


def written_metrics(script: str) -> set[str]:
    """The keys of metrics that a stage script names, but for those that it takes out again."""
    tree = ast.parse(conftest.script_path(script).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    popped = {call.args[0].value for call in calls if ast.unparse(call.func).endswith(".pop") and call.args}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    keys = {text for text in strings if METRIC.fullmatch(text)} | strings & {"grad_norm", "learning_rate", "episode"}
    return keys - popped


def test_the_tables_of_metrics_have_the_keys_that_are_written():
    rows = re.findall(r"^\| (`.*?) \| ", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    told = [key for row in rows if "(above)" not in row for key in re.findall(r"`([^`]+)`", row)]
    assert len(told) == len(set(told))
    known = set().union(*(written_metrics(script) for script in [*STAGES, *MADE]))
    assert {re.sub(r"_\d$", "_", key) for key in told} == known  # of keys for each reward model the first ones


def speed_table(name: str, peers: str) -> str:
    """A table of speed.py as it is shown: a line per measurement, ours beside the peers'."""
    with (ROOT / f"benchmark/results/{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    lines = [
        f"| stage | ours, items/s | {peers}, items/s | ratio | share of the product's rate | peak GiB |",
        "|" + "---|" * 6,
    ]
    for row, peer in zip(rows[::2], rows[1::2], strict=True):
        assert (row["stage"], row["who"]) == (peer["stage"], "ours")
        cells = [row["stage"], row["items/s"], peer["items/s"], f"**{peer['ours is faster by']}**"]
        cells += [row["of a matrix product"], f"{row['peak GiB']}, {peers} {peer['peak GiB']}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def h100_tables() -> list[str]:
    """Two tables: speed on the H100 beside TRL's; and hours and memory, as measured and as plan.py has them."""
    names = ("device", "stages", "trl")
    product, stages, peers = (conftest.read_csv(ROOT / f"benchmark/results/h100/{name}.csv") for name in names)
    rate, peers = float(product[0]["TFLOP/s of a product"]), {row["stage"]: row for row in peers}
    speed = "| 1B on one H100 | ours, items/s | TRL, items/s | ratio | TFLOP/s in training |"
    speed += " share of the product's rate | seconds of an update | seconds of PPO's phases |\n" + "|---" * 8 + "|\n"
    hours = (
        "| 1B on one H100 | items of a run | hours at the measured speed | peak GB, measured | peak GB by plan.py |\n"
    )
    hours += "|---" * 5 + "|\n"
    for row in sorted(stages, key=lambda row: list(plan.STAGES).index(row["stage"])):
        stage, per_second, peer = row["stage"], float(row["items/s"]), peers[row["stage"]]
        ratio = f"**{peer['ours faster by'].split()[0]}**" if peer["items/s"] else "not measured"
        phases = row["phases, s"].partition(";")[0].replace("update", "training")
        seconds_exact = int(row["items of an update"]) / per_second
        seconds = f"{seconds_exact:.2f}"
        training = re.search(r"update ([\d.]+)", row["phases, s"])  # the others only train
        reached = round(1e3 * float(row["PFLOP of training"]) / float(training[1] if training else seconds_exact))
        cells = [stage, row["items/s"], peer["items/s"] or "not measured", ratio, reached, f"{reached / rate:.2f}"]
        cells += [seconds, phases]
        speed += f"| {' | '.join(map(str, cells))} |\n"
        asked = plan.Args(stage, gpus=1, zero=0, reserve=0, micro_batch_size=int(row["micro-batch"]))
        items, planned = plan.STAGES[stage][1], plan.plan(asked)
        cells = [stage, f"{items:,}", f"{items / per_second / 3600:.2f}"]
        cells += [f"{float(row['peak GiB']) * 2**30 / 1e9:.1f}", f"{planned['peak'] / 1e9:.1f}"]
        hours += f"| {' | '.join(cells)} |\n"
    return [speed, hours]


def tables() -> list[str]:
    return [speed_table("throughput", "TRL"), speed_table("authors", "theirs"), *h100_tables()]


def test_the_tables_of_speed_are_what_was_measured():
    text = (ROOT / "benchmark/README.md").read_text()
    assert [text.count(table) for table in tables()] == [1] * 4, "run python tests/test_readme.py"


if __name__ == "__main__":
    speed = ROOT / "benchmark/README.md"
    text = LINK.sub(lambda m: f"[`{m[1]}`](../{m[2]}#L{found_lines(m[1], m[2])[0]})", DETAILS.read_text())
    DETAILS.write_text(text)
    text = speed.read_text()
    for table in tables():  # known by their heads
        head = re.escape(table.split("\n")[0])
        text = re.sub(rf"^{head}\n(\|.*\n)+", lambda _, table=table: table, text, flags=re.MULTILINE)
    speed.write_text(text)
