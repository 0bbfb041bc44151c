"""What is a changed script worth? Train it beside the original on the same seeds, and compare both by the hidden truth.

    python quickstart/score.py ppo_mine.py                           # beside ppo.py, on seeds 1 to 8
    python quickstart/score.py ppo.py "ppo.py --lam 1" variants/rloo.py dpo.py --seeds 1 2 3 4 --jobs 2
    python quickstart/score.py ppo_mine.py --confirm                 # once more, on seeds that it was never tried on
    python quickstart/score.py --show --rows quickstart/results/rows.csv --commit 12bc2ba    # rows of an older commit

A candidate is a script with flags. Its Args tell which stage it replaces: a copy of sft.py, reward.py, ppo.py or
dpo.py, anything in variants/, or a script that a diff of ablations/ makes. The stages before it are made once and kept;
those after it follow, so that a reward model is also judged by the PPO policy trained against it. With one candidate,
the baseline is the script of that stage in this checkout; with several, it is the first one.

Rows go to a ledger as they come, and a run whose row is there is not made again. Three columns are hashes:

    version     script (without comments and docstrings), files that it imports or its flags name, and its flags
    bed         all that candidates share: the other stages and their flags, data, base model, metric and libraries
    key         bed, version, seed and note: one run

An edited script is another version, and its earlier rows count as a try.

The baseline also runs with another micro-batch, which changes its rounding alone. How far these A/A runs are apart is
the noise floor, and no difference below it is called one. Another processor changes rounding in all stages, so that a
seed has another reward model there: runs are compared with a baseline's of the same processor, and made again on
another one.

All numbers come from the saved model in another process (metric.py), on posts that are generated only after training
has ended. This guards against accidents and against edits of a copy's own evaluation.
"""

import ast
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Annotated, Literal

os.environ["MPLBACKEND"] = "agg"  # the backend that a notebook chooses may not be installed here

import pandas
import tyro
from filelock import FileLock
from matplotlib.figure import Figure
from paired import noise_pairs, summarise, verdict

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "eval"))

from eval_helpers import at_least, fail, markdown, with_sd  # noqa: E402

# what run.sh sets beside the papers' tables; PPO has half of its episodes and one micro-batch an update
BASE = {
    "sft": "--learning-rate 1e-3 --batch-size 32 --micro-batch-size 8",
    "reward": "--learning-rate 1e-3 --batch-size 16 --micro-batch-size 8",
    "ppo": "--learning-rate 1e-4 --batch-size 64 --micro-batch-size 64 --total-episodes 1920 --sample-every 0",
    "dpo": "--learning-rate 2e-5 --batch-size 32 --micro-batch-size 8 --total-episodes 8000",
}
NOISE = {"sft": [4], "reward": [4], "ppo": [16], "dpo": [4]}  # micro-batch sizes of the A/A runs
CONFIRM = range(101, 109)
# numbers of a row, with their digits in the table, and those that have another name there
NUMBERS = {"truth": 3, "win_rate": 3, "wrong_facts": 2, "words": 1, "kl": 2, "score": 2, "eos_rate": 2, "accuracy": 3}
NUMBERS |= {"rougeL": 3, "seconds": 0}
NAMES = {"win_rate": "win rate", "wrong_facts": "wrong facts", "kl": "KL to SFT", "eos_rate": "EOS"}
NAMES |= {"rougeL": "ROUGE-L"}
COLUMNS = ["key", "bed", "version", "commit", "date", "candidate", "note", "stage", "size", "seed", "cpu", "threads"]
COLUMNS += ["torch", "transformers", *NUMBERS, "failed"]


@dataclass
class Args:
    candidates: Annotated[list[str], tyro.conf.Positional] = field(default_factory=list)
    """scripts, each with its flags in quotation marks"""
    seeds: list[int] = field(default_factory=lambda: list(range(1, 9)))
    """seeds that all candidates run on"""
    size: Literal["xs", "s", "m"] = "s"
    """size of the base model in quickstart/bases"""
    jobs: int = 1
    """runs at a time, one thread each"""
    confirm: bool = False
    """compare on seeds 101 to 108 instead; only then a candidate is called better"""
    noise: list[int] = field(default_factory=list)
    """micro-batch sizes of the A/A runs; default: one"""
    show: bool = False
    """print table and figure of the rows that are there; run nothing"""
    commit: str = ""
    """show the rows of this commit instead of those of today's scripts; candidates are labels of the table"""
    rows: Path = Path("runs/score/rows.csv")
    """the ledger"""
    of: Literal["truth", "win_rate", "wrong_facts", "words", "kl", "score", "eos_rate", "accuracy"] = "truth"
    """the number whose differences are tested"""
    figure: Path | None = None
    """file of the figure; default: the ledger's name with .png"""
    runs: Path | None = None
    """folder of the runs; default: the ledger's"""
    data: Path = Path("data/quickstart/posts-1")
    """data of the quick start"""


# ==== candidates and keys ========================================================================


@dataclass
class Candidate:
    """A script with flags. text: both, as in the table. stage: the one that it replaces. command: path of the script,
    and its flags. code: hash of the script and of the files that its flags name. others: candidates for later stages of
    the same chain. data: its own data, in a folder that is named by a hash of how they are made."""

    text: str
    stage: str
    command: list[str]
    code: str
    others: tuple["Candidate", ...] = ()
    data: Path | None = None

    @property
    def version(self) -> str:
        """Hash of code and flags: an edited script is another try."""
        more = [other.version for other in self.others] + ([self.data.name] if self.data else [])
        return digest(self.code, self.command[1:], *more)


def code_of(path: Path, seen: frozenset = frozenset()) -> str:
    """Return a hash of a script's code, without comments and docstrings, and of the files beside it that it imports."""
    code, names = code_and_imports(path.read_text())
    beside = [path.resolve().parent / f"{name}.py" for name in names]
    beside += [file for name in names for file in path.resolve().parent.glob(f"{name}/**/*.py")]
    seen |= {path.resolve()}
    return digest(code, [code_of(file, seen) for file in beside if file.is_file() and file not in seen])


@cache
def code_and_imports(text: str) -> tuple[str, list[str]]:
    """Return a script's code without comments and docstrings, and the names of the modules that it imports, sorted."""
    tree, names = ast.parse(text), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            texts = [x for x in node.body if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)]
            node.body = [x for x in node.body if x not in texts] or [ast.Pass()]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            names |= {module.partition(".")[0] for module in modules}
    return ast.unparse(tree), sorted(names - {""})


def digest(*values) -> str:
    """Return a short hash of values that JSON can hold."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]


def content(paths: Iterable[Path]) -> str:
    """Return a short hash of the bytes of some files."""
    return digest([hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths)])


def weights_of(folder: Path) -> str:
    """Return a hash of a run's model: its weights and, of a reward model, the mean that centres its rewards."""
    means = [json.loads(file.read_text()).get("reward_mean") for file in folder.glob("model/config.json")]
    return content(folder.glob("model/*.safetensors")) + "".join(f" centred by {x}" for x in means if x is not None)


def fields_of(path: Path) -> frozenset[str]:
    """Return the names of a script's arguments."""
    return fields_in(path.read_text())


@cache
def fields_in(text: str) -> frozenset[str]:
    """Return the names of the fields of a script's Args."""
    classes = [x for x in ast.parse(text).body if getattr(x, "name", "") == "Args"]
    return frozenset(x.target.id for node in classes for x in node.body if isinstance(x, ast.AnnAssign))


def stage_of(path: Path) -> str:
    """Return which stage a script replaces."""
    fields = fields_of(path)
    if fields & {"reward_model_path", "reward_model_paths", "reward_function"}:
        return "ppo"
    if {"preference_dataset", "sft_model_path"} <= fields:
        return "reward" if "dataset" in fields else "dpo"
    if "loss_on" in fields:
        return "sft"
    fail(f"{path} is no copy of sft.py, reward.py, ppo.py or dpo.py: its Args have none of their paths")


def base_flags(stage: str, size: str) -> list[str]:
    """Return the flags that every candidate of a stage starts from; its own come after them."""
    return shlex.split(BASE[stage]) + (["--num-train-epochs", "3"] if (stage, size) == ("sft", "m") else [])


def candidate(text: str) -> Candidate:
    """Return the candidate that a command line names."""
    try:
        name, *flags = shlex.split(text)
        path = Path(name) if Path(name).exists() else ROOT / name
        if not path.is_file():
            fail(f'{name} does not exist. A candidate is a script with its flags, such as "ppo.py --lam 1"')
        named = [Path(word.rpartition("=")[2].partition(":")[0]) for word in flags]  # such as my_reward.py:function
        code = digest(code_of(path), content(file for file in named if file.is_file()))
        return Candidate(shlex.join([name, *flags]), stage_of(path), [str(path.resolve()), *flags], code)
    except (SyntaxError, ValueError) as error:
        fail(f"{text}: {error}")


def original(stage: str) -> Candidate:
    """Return the stage's script of this checkout."""
    return replace(candidate(str(ROOT / f"{stage}.py")), text=f"{stage}.py")


def machine() -> dict:
    """Return what two runs need to agree in to give the same digits: processor, threads and versions. Clouds give many
    processors one name, so that it needs numbers and the instructions that decide which kernels run."""
    file = Path("/proc/cpuinfo")
    text = file.read_text().split("\n\n")[0] if file.exists() else ""
    facts = dict(re.findall(r"^(.+?)\s*: (.*)$", text, re.MULTILINE))
    cpu = platform.processor() or platform.machine()
    if "model name" in facts:
        numbers = "-".join(facts.get(key, "?") for key in ("cpu family", "model", "stepping"))
        kinds = [x for x in ("avx2", "avx512f", "amx_tile") if x in facts.get("flags", "").split()]
        cpu = f"{facts['model name']} ({' '.join([numbers, *kinds])})"
    return {"cpu": cpu, "threads": 1} | libraries()


def libraries() -> dict:
    """Return the versions of the libraries that decide what a run computes."""
    return {"torch": version("torch"), "transformers": version("transformers")}


# ==== runs =======================================================================================


def trained(one: Candidate, inputs: dict[str, Path], seed: int, args: Args) -> Path:
    """Return the folder of a candidate's run on a seed, made where it is not there. inputs: the folders {stage: folder}
    of the runs that it may start from."""
    weights = {name: weights_of(folder) for name, folder in inputs.items()}
    flags = base_flags(one.stage, args.size) + one.command[1:]
    base = ROOT / "quickstart/bases" / f"nano-{args.size}"
    key = digest(one.code, flags, weights, data_of(args.data), content(base.glob("*.*")), seed, machine())
    folder = (args.runs or args.rows.parent) / one.stage / key
    # last, because of a flag that is given twice the last one counts: no candidate changes its seed, models or data
    flags += ["--model", base, "--seed", seed, "--output-dir", folder]
    paths = {"dataset": args.data / "tldr/sft", "preference_dataset": args.data / "tldr/preference"}
    paths |= {"sft_model_path": inputs.get("sft"), "reward_model_path": inputs.get("reward")}
    paths |= {"reward_model_paths": inputs.get("reward")}
    for name in fields_of(Path(one.command[0])) & set(paths):
        flags += [f"--{name.replace('_', '-')}", paths[name]]
    with FileLock(f"{folder}.lock"):  # two calls at once, or two candidates with one upstream run
        if not ((folder / "model").exists() and Path(f"{folder}.done").exists()):
            if (folder / "model").exists():  # saved by a run that failed afterwards
                shutil.rmtree(folder)
            resume = ["--resume"] if (folder / "args.json").exists() else []
            run([one.command[0], *flags, *resume], Path(f"{folder}.log"))
            Path(f"{folder}.done").touch()
    for name, old in weights.items():
        if weights_of(inputs[name]) != old:
            shutil.rmtree(inputs[name])
            raise RuntimeError(f"it changed the {name} model that it starts from")
    if candidate(shlex.join(one.command)).code != one.code:
        raise RuntimeError("the script was edited while this was running")
    return folder


def run(command: list, log: Path) -> str:
    """Run a Python command on one thread of the CPU and return the last line that it printed. For a failure, that line
    is its error."""
    log.parent.mkdir(parents=True, exist_ok=True)
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    settings |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    with log.open("w") as file:
        words = [sys.executable, *map(str, command)]
        code = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, env=os.environ | settings).returncode
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip() and "━" not in line]
    if code:
        raise RuntimeError(f"{lines[-1][:200] if lines else 'no output'} (exit code {code}, {log})")
    return lines[-1]


def make_row(one: Candidate, seed: int, note: str, args: Args) -> dict:
    """Train a candidate on a seed with what comes before and after it, and return its row. note is "" for its own,
    "A/A" with a micro-batch size for a run that differs by rounding, or "SFT" for the policy that PPO starts from."""
    chain = {stage: original(stage) for stage in ("sft", "reward", "ppo")}
    chain |= {other.stage: other for other in (one, *one.others)}
    args = replace(args, data=one.data or args.data)
    row = {"candidate": one.text, "note": note, "stage": one.stage, "size": args.size, "seed": seed} | machine()
    try:
        made = {}
        made["sft"] = trained(chain["sft"], {}, seed, args)
        made["reward"] = trained(chain["reward"], made, seed, args)
        policy = made["sft"]
        if note != "SFT":
            policy = trained(one if one.stage == "dpo" else chain["ppo"], made, seed, args)
        metric = ["--policy", policy, "--sft", made["sft"], "--reward", made["reward"]]
        with FileLock(f"{policy}.lock"):
            row |= json.loads(run([ROOT / "quickstart/metric.py", *metric], Path(f"{policy}.metric.log")))
        last_line = (made.get(one.stage, policy) / "metrics.jsonl").read_text().splitlines()[-1]
        row["seconds"] = json.loads(last_line).get("time/total")
    except (RuntimeError, OSError, ValueError, IndexError, SystemExit) as error:
        row["failed"] = f"{type(error).__name__}: {error}".removeprefix("RuntimeError: ")
    return row


@cache
def data_of(folder: Path) -> str:
    """Return a hash of the training data."""
    return content(folder.glob("tldr/**/*.arrow"))


def bed_of(args: Args) -> str:
    """Return a hash of all that the candidates of a table share: other stages, their flags, data, metric, libraries."""
    stages = [code_of(ROOT / f"{stage}.py") for stage in BASE]
    metric = [code_of(ROOT / file) for file in ("quickstart/metric.py", "eval/eval_helpers.py")]
    metric += [content([ROOT / "quickstart/sentences.json"])]
    base = content((ROOT / "quickstart/bases" / f"nano-{args.size}").glob("*.*"))
    flags = [base_flags(stage, args.size) for stage in BASE]
    return digest(stages, metric, code_of(ROOT / "tldr_dataset.py"), flags, data_of(args.data), base, libraries())


def read_ledger(path: Path) -> pandas.DataFrame:
    """Return the rows of the ledger, of which the last one of a key and a processor counts."""
    if not path.exists():
        return pandas.DataFrame(columns=COLUMNS)
    text = dict.fromkeys(["key", "bed", "version", "commit", "note", "failed"], str)  # not all digits are numbers
    rows = pandas.read_csv(path, dtype=text, keep_default_na=False, na_values=[""])
    if list(rows) != COLUMNS:  # made by another version: rows that are added would be shifted
        fail(f"{path} has other columns than the rows of this checkout: move it away, or choose another --rows")
    return rows.drop_duplicates(["key", "cpu"], keep="last").fillna({"note": "", "failed": ""})


def append(path: Path, row: dict):
    """Add a row to the ledger. Safe for two processes at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pandas.DataFrame([row]).reindex(columns=COLUMNS)
    with FileLock(f"{path}.lock"):
        table.to_csv(path, mode="a", header=not path.exists(), index=False, float_format="%.6g")


def make_missing(jobs: list[tuple], versions: dict[str, str], args: Args, make: Callable | None = None):
    """Make the rows of those jobs (candidate, seed, note) that the ledger lacks on this processor. make: what to call
    for make_row."""
    bed, rows = bed_of(args), read_ledger(args.rows).query("failed == ''")
    known = set(rows.loc[rows["cpu"] == machine()["cpu"], "key"])
    missing = {digest(bed, job[0].version, *job[1:]): job for job in jobs}
    missing = {key: job for key, job in missing.items() if key not in known}
    commit = commit_of()
    if commit.endswith("-dirty"):
        print(f"The checkout differs from its last commit: rows are marked {commit}, and the baseline is as it is now.")
    start = time.time()

    def work(item) -> dict:
        key, job = item
        version = versions.get(job[0].text, job[0].version)  # A/A runs have their baseline's
        row = {"key": key, "bed": bed, "version": version, "commit": commit, "date": time.strftime("%Y-%m-%d")}
        row |= (make or make_row)(*job, args)
        append(args.rows, row)
        return row

    with ThreadPool(args.jobs) as pool:
        for done, row in enumerate(pool.imap_unordered(work, missing.items()), 1):
            left = (time.time() - start) / done * (len(missing) - done) / 60
            result = row.get("failed") or f"truth {row['truth']:.3f}, KL {row['kl']:.2f}"
            name = f"{row['candidate']} {row['note']}".strip()
            print(f"[{done} of {len(missing)}] {name}, seed {row['seed']}: {result}; {left:.0f} min left", flush=True)


# ==== table and figure ===========================================================================


def comparable(rows: pandas.DataFrame, versions: dict[str, str], args: Args) -> pandas.DataFrame:
    """Return the rows of the ledger that share one bed: today's, or with --commit that of the first candidate. Rows of
    one version have one name, and those from before an edit are named "SCRIPT as of VERSION"."""
    rows = rows[rows["seed"].isin(CONFIRM) == args.confirm]
    if args.commit:
        rows = rows[(rows["commit"] == args.commit) & (rows["size"] == args.size)]
        first = rows[rows["candidate"].isin(list(versions)[:1])] if versions else rows
        rows = rows[rows["bed"].isin(first["bed"][:1])]
    else:
        rows = rows[rows["bed"] == bed_of(args)]
    newest = dict(zip(rows["candidate"], rows["version"], strict=True))  # of rows with one name, the last one
    newest |= {name: wanted for name, wanted in versions.items() if wanted}
    names = {}  # of each version in the table
    for name, its_version in zip(rows["candidate"], rows["version"], strict=True):
        names[its_version] = name if newest[name] == its_version else f"{name} as of {its_version}"
    for name in reversed(versions):  # two candidates with one version: the first one's name
        if name in newest:
            names[newest[name]] = name
    rows = rows.assign(candidate=rows["version"].map(names))
    return rows.drop_duplicates(["candidate", "note", "seed", "cpu"], keep="last")


def one_a_seed(values: pandas.Series) -> pandas.Series:
    """Return values by seed of values by seed and processor, without those that are missing."""
    return values.dropna().groupby(level="seed").mean()


def commit_of() -> str:
    """Return the checkout's last commit that changed more than results and pages, with -dirty if files other than these
    differ from it."""
    code = ["--", ".", ":!*/results/*", ":!*.md"]
    last = ["git", "log", "-1", "--format=%h", *code]
    commit = subprocess.run(last, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    differs = subprocess.run(["git", "diff", "--quiet", "HEAD", *code], cwd=ROOT, capture_output=True).returncode == 1
    return commit and commit + "-dirty" * differs


def one_commit(runs: Path, commits: Iterable[str]) -> str:
    """Return commit_of. Ends with an error if a study cannot go on under it: the code is edited, or a folder of runs or
    rows with these commits are of another one."""
    commit, file = commit_of(), runs / "commit"
    if commit.endswith("-dirty"):
        fail(f"the code differs from commit {commit.removesuffix('-dirty')}: commit your changes, or take them back")
    if others := set(commits) - {commit}:
        fail(f"the code is that of commit {commit}, and there are rows of {others.pop()}: move them away, or go back")
    if file.exists() and file.read_text() != commit:
        fail(f"the code is that of commit {commit}, and {runs} of {file.read_text()}: empty the folder, or go back")
    runs.mkdir(parents=True, exist_ok=True)
    file.write_text(commit)
    return commit


def report(versions: dict[str, str], args: Args):
    """Print the table of candidates {name: version}, of which the first is the baseline, and draw truth over KL. {}: of
    all that are in the ledger, in the order of their first rows."""
    ledger = read_ledger(args.rows)
    rows = comparable(ledger, versions, args)
    own_rows = rows[rows["note"] == ""]
    has_noise = set(rows[rows["note"].str.startswith("A/A")]["candidate"])
    names = list(versions) or sorted(own_rows["candidate"].unique(), key=lambda name: name not in has_noise)
    baseline = own_rows[own_rows["candidate"].isin(names[:1])]
    if baseline.empty:
        fail(f"{args.rows} has no rows of {' '.join(names[:1]) or 'these scripts'} with this code, data and machine")
    # all tries against this baseline count in the correction, because each could have looked good by chance
    stages = {baseline.iloc[0]["stage"], *own_rows[own_rows["candidate"].isin(names)]["stage"]}
    by_name = dict(list(own_rows[own_rows["stage"].isin(stages)].groupby("candidate")))
    tables = {name: own.drop_duplicates("seed", keep="last").set_index("seed") for name, own in by_name.items()}
    tries = len(tables) - 1  # those of a study that is shown; a user's ledger counts tries on other code, too
    if not args.commit:
        alike = ledger[ledger["stage"].isin(stages) & (ledger["note"] == "") & (ledger["size"] == args.size)]
        tries = alike["version"].nunique() - 1
    plain, noise = tables[names[0]], noise_pairs(ledger, baseline.iloc[0], args.of)
    values = {name: own.set_index(["seed", "cpu"])[args.of] for name, own in by_name.items()}
    differences = {name: one_a_seed(own - values[names[0]]) for name, own in values.items() if name != names[0]}
    summaries = summarise(pandas.DataFrame(differences), noise, tries)

    first = rows[rows["note"] == "SFT"].drop_duplicates(["candidate", "seed"], keep="last")
    starts = {f"{name}: SFT": own.set_index("seed") for name, own in first.groupby("candidate")}
    shown = {name: tables[name] for name in names if name in tables}
    print(f"size {args.size}, seeds {', '.join(map(str, plain.index.sort_values()))}; mean ± standard deviation\n")
    print(table_of(starts | shown, summaries, args.of))
    if noise and summaries:
        floor = max(summary["floor"] for summary in summaries.values())
        print(f"\nnoise floor of a difference in {args.of}: {floor:.3f} ({len(noise)} A/A runs)")
    for name in names[1:] if args.of == "truth" else []:
        own = tables.get(name, plain[:0])
        failed = own["failed"][own["failed"] != ""]
        lacking = own.dropna(subset="truth").index.difference(differences.get(name, plain[args.of]).index)
        if versions.get(name) and versions[name] == versions[names[0]]:
            words = "the same code and flags"
        elif len(failed):  # the other seeds may be those on which it did well
            messages = "".join(f"\n    seed {seed}: {message}" for seed, message in failed.items())
            words = f"cannot be told: {len(failed)} of {len(own)} seeds failed{messages}"
        elif len(lacking):
            words = f"cannot be told: {names[0]} lacks its seeds {', '.join(map(str, lacking))} on one processor"
        elif name not in summaries:
            words = "cannot be told: fewer than two seeds"
        else:
            words = verdict(summaries[name], len(CONFIRM) if args.confirm else 0)
        print(f"{name} beside {names[0]}: {words}")
    draw(shown, args.figure or args.rows.with_suffix(".png"))


def table_of(tables: dict[str, pandas.DataFrame], summaries: dict[str, dict], of: str) -> str:
    """Return a Markdown table: a line for each candidate {name: rows by seed}, with its differences to the baseline."""
    lines = []
    for name, own in tables.items():
        cells = {"": f"`{name}`", "seeds": str(own[of].count())}
        cells |= {NAMES.get(key, key): with_sd(own[key].dropna(), digits) for key, digits in NUMBERS.items()}
        if name in summaries:
            difference = "{mean:+.3f} ({low:+.3f} to {high:+.3f})".format(**summaries[name])
            cells |= {f"{of} less the baseline's, 95 %": difference, "p, Holm": f"{summaries[name]['holm']:.3f}"}
            cells["would have shown"] = f"{summaries[name]['power']:.3f}"
        lines.append(cells)
    columns = [key for key in dict.fromkeys(key for cells in lines for key in cells) if any(x.get(key) for x in lines)]
    return markdown([{key: cells.get(key, "") for key in columns} for cells in lines])


def draw(tables: dict[str, pandas.DataFrame], path: Path):
    """Draw truth over KL: a point a seed, and a larger one for the median. A seed more than 0.15 below all medians is
    drawn at the end of the axis, with its truth."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    axis = figure.subplots()
    end = min(own["truth"].median() for own in tables.values()) - 0.15
    for i, (name, own) in enumerate(tables.items()):
        marker = "osD^vPX*"[i % 8]
        axis.scatter(own["kl"], own["truth"].clip(lower=end), s=14, alpha=0.45, color=f"C{i}", marker=marker)
        middle = own[["kl", "truth"]].median()
        axis.scatter(*middle, s=110, color=f"C{i}", marker=marker, edgecolor="black", label=name.replace("$", r"\$"))
        for _, row in own[own["truth"] < end].iterrows():
            axis.annotate(f"{row['truth']:.2f}", (row["kl"], end), (8, 4), textcoords="offset points", color=f"C{i}")
    axis.set(xlabel="KL to SFT (nats a response)", ylabel="truth")
    figure.legend(frameon=False, loc="outside lower left")
    figure.savefig(path, dpi=90)
    print(f"\nfigure: {path}")


def main(args: Args):
    if not args.confirm and (used := sorted(set(args.seeds) & set(CONFIRM))):
        fail(f"--seeds has {used[0]}: seeds {CONFIRM[0]} to {CONFIRM[-1]} are kept for --confirm")
    at_least(1, args, "jobs")
    seeds = CONFIRM if args.confirm else args.seeds
    chosen = [candidate(text) for text in args.candidates if not args.commit]
    if len(chosen) == 1:
        chosen.insert(0, original(chosen[0].stage))
    versions = {one.text: one.version for one in chosen} or dict.fromkeys(args.candidates, "")
    if args.show or args.commit:
        report(versions, args)
        return
    if not chosen:
        fail('name a script, such as ppo_mine.py or "ppo.py --lam 1"')
    if not (args.data / "tldr").exists():
        fail(f"{args.data} has no data: bash quickstart/run.sh --size {args.size} --data-only makes them")
    sizes = [] if args.confirm else args.noise or NOISE[chosen[0].stage]
    noisy = {size: candidate(f"{chosen[0].text} --micro-batch-size {size}") for size in sizes}
    jobs = []  # seed by seed, so that an interrupted call leaves whole pairs
    for seed in seeds:
        jobs += [(one, seed, "") for one in chosen]
        jobs += [(replace(one, text=chosen[0].text), seed, f"A/A {size}") for size, one in noisy.items()]
        jobs += [(one, seed, "SFT") for one in (original("sft"), *chosen) if one.stage == "sft"]
    make_missing(jobs, versions, args)
    report(versions, args)


if __name__ == "__main__":
    main(tyro.cli(Args))
