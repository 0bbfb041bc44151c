"""What is a changed script worth? Train it beside the original on the same seeds, and compare both by the hidden truth.

    python quickstart/score.py ppo_mine.py                           # beside ppo.py, on seeds 1 to 8
    python quickstart/score.py ppo.py "ppo.py --lam 1" variants/rloo.py dpo.py --seeds 1 2 3 4 --jobs 2
    python quickstart/score.py ppo_mine.py --confirm                 # once more, on seeds that it was never tried on
    python quickstart/score.py --show                                # only table and figure of the rows that are there

A candidate is a script with flags. Its Args tell which stage it replaces: a copy of sft.py, reward.py, ppo.py or
dpo.py, anything in variants/, or a script that a diff of ablations/ makes. The stages before it are made once and kept;
those after it follow, so that a reward model is judged by the PPO policy trained against it, too. With one candidate,
the baseline is the script of that stage in this checkout; with several, it is the first one.

Rows go to a ledger as they come, and a run whose row is there is not made again. The key of a row is a hash of the
script without comments and docstrings, its flags, the stages before and after it, data, the metric's code, and the
machine. A script that has been edited is another candidate, and its earlier rows count as a try.

The baseline also runs with other micro-batches, which changes its rounding alone: how far these A/A runs are apart is
the noise floor, and no difference below it is called one.

Truth, KL and all else come from the saved model in another process (metric.py), on posts that are generated only after
the training has ended. This guards against accidents and against edits of a copy's own evaluation.
"""

import ast
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from math import sqrt
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Annotated, Literal

import pandas
import tyro
from filelock import FileLock
from matplotlib.figure import Figure
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "eval"))

from eval_helpers import fail, markdown  # noqa: E402

# what run.sh sets beside the papers' tables; PPO has half of its episodes and one micro-batch an update
BASE = {
    "sft": "--learning-rate 1e-3 --batch-size 32 --micro-batch-size 8",
    "reward": "--learning-rate 1e-3 --batch-size 16 --micro-batch-size 8",
    "ppo": "--learning-rate 1e-4 --batch-size 64 --micro-batch-size 64 --total-episodes 1920 --sample-every 0",
    "dpo": "--learning-rate 2e-5 --batch-size 32 --micro-batch-size 8 --total-episodes 8000",
}
NOISE = {"sft": 4, "reward": 4, "ppo": 16, "dpo": 4}  # micro-batch size of the A/A runs
CONFIRM = range(101, 109)
NUMBERS = {"truth": 3, "win_rate": 3, "wrong_facts": 2, "words": 1, "kl": 2, "score": 2, "eos_rate": 2, "accuracy": 3}
COLUMNS = ["key", "bed", "version", "commit", "date", "candidate", "note", "stage", "size", "seed", "cpu", "threads"]
COLUMNS += ["torch", "transformers", *NUMBERS, "rougeL", "seconds", "failed"]


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
    show: bool = False
    """print table and figure of the rows that are there; run nothing"""
    rows: Path = Path("runs/score/rows.csv")
    """the ledger"""
    data: Path = Path("data/quickstart/posts-1")
    """data of the quick start; made where it is not there"""
    posts: int = 500
    """number of posts that the policies are measured on"""


# ==== candidates and keys ========================================================================


@dataclass
class Candidate:
    text: str
    """script and flags, as in the table"""
    stage: str
    """which stage it replaces: sft, reward, ppo or dpo"""
    command: list[str]
    """path of the script, and its flags"""
    code: str
    """hash of the script's code"""

    @property
    def version(self) -> str:
        """Hash of code and flags: an edited script is another try."""
        return digest(self.code, self.command[1:])


def code_of(path: Path) -> str:
    """Return a hash of a script's code: comments, docstrings and line breaks do not count."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            is_text = [isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant) for x in node.body]
            node.body = [x for x, text in zip(node.body, is_text, strict=True) if not text] or [ast.Pass()]
    return digest(ast.unparse(tree))


def digest(*values) -> str:
    """Return a short hash of values that JSON can hold."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]


def stage_of(path: Path) -> str:
    """Return which stage a script replaces, from the fields of its Args."""
    classes = [x for x in ast.parse(path.read_text()).body if isinstance(x, ast.ClassDef) and x.name == "Args"]
    fields = {x.target.id for node in classes for x in node.body if isinstance(x, ast.AnnAssign)}
    if fields & {"reward_model_path", "reward_function"}:
        return "ppo"
    if {"preference_dataset", "sft_model_path"} <= fields:
        return "reward" if "dataset" in fields else "dpo"
    if "loss_on" in fields:
        return "sft"
    fail(f"{path} is no copy of sft.py, reward.py, ppo.py or dpo.py: its Args have none of their paths")


def candidate(text: str) -> Candidate:
    """Return the candidate that a command line names."""
    name, *flags = shlex.split(text)
    path = Path(name) if Path(name).exists() else ROOT / name
    if not path.is_file():
        fail(f'{name} does not exist. A candidate is a script with its flags, such as "ppo.py --lam 1"')
    return Candidate(shlex.join([name, *flags]), stage_of(path), [str(path.resolve()), *flags], code_of(path))


def machine() -> dict:
    """Return what makes two runs comparable to the last digit: processor, threads and versions."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = lines[0].partition(":")[2].strip() if lines else cpu
    return {"cpu": cpu, "threads": 1, "torch": version("torch"), "transformers": version("transformers")}


# ==== runs =======================================================================================


class Failed(Exception):
    """A run that ended with an error; its message is the last line that it printed."""


def trained(one: Candidate, inputs: dict[str, tuple[str, Path]], seed: int, args: Args) -> tuple[str, Path]:
    """Return (key, run folder) of a candidate's run on a seed, made where it is not there. inputs {sft, reward: (key,
    folder)} are the runs that it starts from."""
    base = {"reward": "sft", "dpo": "sft", "ppo": "sft reward"}.get(one.stage, "").split()
    keys = {name: inputs[name][0] for name in base}
    data = digest(*((path.name, path.stat().st_size) for path in sorted(args.data.rglob("*.arrow"))))
    flags = shlex.split(BASE[one.stage]) + one.command[1:]
    key = digest(one.code, flags, keys, data, args.size, seed, machine())
    folder = args.rows.parent / one.stage / key
    model = ROOT / "quickstart/bases" / f"nano-{args.size}"
    command = [*one.command[:1], "--model", model, "--seed", seed, "--output-dir", folder, *flags]
    script_fields = Path(one.command[0]).read_text()
    if one.stage != "sft":
        command += ["--sft-model-path", inputs["sft"][1]]
    if one.stage == "ppo" and "reward_model_path:" in script_fields:
        command += ["--reward-model-path", inputs["reward"][1]]
    if one.stage != "dpo":
        command += ["--dataset", args.data / "tldr/sft"]
    if one.stage in ("reward", "dpo"):
        command += ["--preference-dataset", args.data / "tldr/preference"]
    if one.stage == "sft" and args.size == "m":
        command += ["--num-train-epochs", 3]
    with FileLock(f"{folder}.lock"):  # two calls at once, or two candidates with one upstream run
        if not (folder / "model").exists():
            run([*command, *(["--resume"] if (folder / "args.json").exists() else [])], Path(f"{folder}.log"))
    return key, folder


def run(command: list, log: Path) -> str:
    """Run a Python command with one thread and return the last line that it printed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    offline = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as file:
        words = [sys.executable, *map(str, command)]
        code = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, env=os.environ | offline).returncode
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip() and "━" not in line]
    if code:
        raise Failed(f"{lines[-1][:200] if lines else 'no output'} (exit code {code}, {log})")
    return lines[-1]


def make_row(one: Candidate, seed: int, note: str, args: Args) -> dict:
    """Train a candidate on a seed with what comes before and after it, and return its row."""
    start = time.time()
    chain = {stage: candidate(str(ROOT / f"{stage}.py")) for stage in ("sft", "reward", "ppo")}
    chain[one.stage] = one
    row = {"candidate": one.text, "note": note, "stage": one.stage, "size": args.size, "seed": seed} | machine()
    try:
        made = {}
        made["sft"] = trained(chain["sft"], {}, seed, args)
        made["reward"] = trained(chain["reward"], made, seed, args)
        policy = trained(one if one.stage == "dpo" else chain["ppo"], made, seed, args)
        metric = ["--policy", policy[1], "--sft", made["sft"][1], "--reward", made["reward"][1], "--posts", args.posts]
        log = Path(f"{policy[1]}.metric.log")
        row |= json.loads(run([ROOT / "quickstart/metric.py", *metric], log))
    except Failed as error:
        row["failed"] = str(error)
    return row | {"seconds": round(time.time() - start)}


def bed_of(args: Args) -> str:
    """Return a hash of all that the candidates of a table share: other stages, their flags, data and metric."""
    stages = [code_of(ROOT / f"{stage}.py") for stage in BASE]
    metric = [code_of(ROOT / f"quickstart/{name}.py") for name in ("metric", "truth", "posts")]
    data = digest(*((path.name, path.stat().st_size) for path in sorted(args.data.rglob("*.arrow"))))
    return digest(stages, metric, BASE, data, args.size, args.posts, machine())


def read_ledger(path: Path) -> pandas.DataFrame:
    """Return the rows of the ledger, of which the last one of a key counts."""
    if not path.exists():
        return pandas.DataFrame(columns=COLUMNS)
    rows = pandas.read_csv(path, dtype={"note": str, "failed": str}, keep_default_na=False, na_values=[""])
    return rows.drop_duplicates("key", keep="last").fillna({"note": "", "failed": ""})


def append(path: Path, row: dict):
    """Add a row to the ledger. Safe for two processes at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        table = pandas.DataFrame([row]).reindex(columns=COLUMNS)
        table.to_csv(path, mode="a", header=not path.exists(), index=False, float_format="%.6g")


# ==== statistics =================================================================================


def summarise(differences: dict[str, list[float]], noise: list[float]) -> dict[str, dict]:
    """Return {candidate: mean, low, high, p, holm, floor, power} of its differences (n,) to the baseline, paired by
    seed. noise: the differences of A/A runs.

    The variance is pooled over the candidates whose own standard deviation is below three times the noise's; the others
    use their own. floor is the largest mean difference that rounding alone would give (95 %), and power the smallest
    effect that so many seeds would show with 80 %."""
    sd = {name: pandas.Series(values).std() for name, values in differences.items()}
    noise_sd = pandas.Series(noise, dtype=float).std() if len(noise) > 1 else float("nan")
    alike = [name for name in differences if 0 < sd[name] < 3 * noise_sd]  # 0: a copy that changes nothing
    found = {}
    for name, values in differences.items():
        n = len(values)
        pool = alike if name in alike else [name]
        freedom = sum(len(differences[other]) - 1 for other in pool)
        if freedom < 1:
            continue
        spread = sqrt(sum((len(differences[other]) - 1) * sd[other] ** 2 for other in pool) / freedom)
        mean = sum(values) / n
        error = spread / sqrt(n)
        half = stats.t.ppf(0.975, freedom) * error
        p = 2 * stats.t.sf(abs(mean) / error, freedom) if error else float(mean == 0)
        power = (stats.t.ppf(0.975, freedom) + stats.t.ppf(0.8, freedom)) * error
        floor = stats.t.ppf(0.975, len(noise) - 1) * noise_sd / sqrt(n) if len(noise) > 1 else float("nan")
        found[name] = {"n": n, "mean": mean, "low": mean - half, "high": mean + half, "p": p}
        found[name] |= {"floor": floor, "power": power}
    corrected = 0.0
    for i, name in enumerate(sorted(found, key=lambda name: found[name]["p"])):
        corrected = max(corrected, min(1.0, found[name]["p"] * (len(found) - i)))
        found[name]["holm"] = corrected
    return found


def verdict(found: dict, confirm: bool) -> str:
    """Return what can be said of a candidate in words."""
    p = found["p"] if confirm else found["holm"]
    if abs(found["mean"]) <= found["floor"]:
        return "cannot be told: below the noise floor"
    if p >= 0.05:
        return f"cannot be told: an effect of {found['power']:.3f} would have shown"
    if found["mean"] < 0:
        return "worse"
    return "better" if confirm else "promising: now --confirm"


# ==== table and figure ===========================================================================


def report(rows: pandas.DataFrame, chosen: list[Candidate], args: Args):
    """Print the table of some candidates, of which the first is the baseline, and draw truth over KL. Without any, it
    has all that are in the ledger, in the order of their first rows."""
    rows = rows[(rows["bed"] == bed_of(args)) & (rows["seed"].isin(CONFIRM) == args.confirm)]
    versions = dict(zip(rows["candidate"], rows["version"], strict=True)) | {one.text: one.version for one in chosen}
    is_old = rows["version"] != rows["candidate"].map(versions)
    rows = rows.assign(candidate=rows["candidate"].where(~is_old, rows["candidate"] + " as of " + rows["version"]))
    names = list(dict.fromkeys(one.text for one in chosen)) or rows[rows["note"] == ""]["candidate"].unique().tolist()
    if not names:
        fail(f"{args.rows} has no rows of these scripts, data, size and machine")
    tables = {name: own.set_index("seed") for name, own in rows[rows["note"] == ""].groupby("candidate")}
    if names[0] not in tables:
        fail(f"{args.rows} has no rows of {names[0]} as it is now, with these data, size and machine")
    plain = tables[names[0]]["truth"]
    differences = {}  # of all tries against this baseline, because each of them could have looked good by chance
    for name, own in tables.items():
        values = (own["truth"] - plain).dropna().tolist()
        if name != names[0] and values:
            differences[name] = values
    noise = []  # of every baseline that has A/A runs
    for name, own in rows[rows["note"] == "A/A"].groupby("candidate"):
        if name in tables:
            noise += (own.set_index("seed")["truth"] - tables[name]["truth"]).dropna().tolist()
    found = summarise(differences, noise)
    lines = []
    for name in names:
        own = tables.get(name, plain.to_frame()[:0])
        cells = {"candidate": name, "seeds": own["truth"].count() if len(own) else 0}
        for key, digits in NUMBERS.items():
            values = own[key].dropna() if key in own else []
            cells[key] = f"{values.mean():.{digits}f} ± {values.std():.{digits}f}" if len(values) > 1 else ""
        if name in found:
            one = found[name]
            cells["truth less the baseline's, 95 %"] = f"{one['mean']:+.3f} ({one['low']:+.3f} to {one['high']:+.3f})"
            cells["p, Holm"] = f"{one['holm']:.3f}"
            cells["would have shown"] = f"{one['power']:.3f}"
        lines.append(cells)
    kind = "confirmation seeds" if args.confirm else "seeds"
    print(f"size {args.size}, {kind} {', '.join(map(str, sorted(plain.index)))}\n")
    columns = list(dict.fromkeys(key for cells in lines for key in cells))
    print(markdown([{key: cells.get(key, "") for key in columns} for cells in lines]))
    floors = [one["floor"] for one in found.values()]
    if floors:
        print(f"\nnoise floor of a difference in truth: {max(floors):.3f} ({len(noise)} A/A runs)")
    for name in names[1:]:
        failed = rows[(rows["candidate"] == name) & (rows["failed"] != "")]
        for _, row in failed.iterrows():
            print(f"{name}, seed {row['seed']}: failed: {row['failed']}")
        if name in found:
            print(f"{name}: {verdict(found[name], args.confirm)}")
    draw({name: tables[name] for name in names if name in tables}, args.rows.with_suffix(".png"))


def draw(tables: dict[str, pandas.DataFrame], path: Path):
    """Draw truth over KL, a point a seed and a larger one for the median."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    for i, (name, own) in enumerate(tables.items()):
        marker = "osD^vPX*"[i % 8]
        axis.scatter(own["kl"], own["truth"], s=14, alpha=0.45, color=f"C{i}", marker=marker)
        middle = own[["kl", "truth"]].median()
        axis.scatter(*middle, s=110, color=f"C{i}", marker=marker, edgecolor="black", label=name.replace("$", r"\$"))
    axis.set(xlabel="KL to SFT (nats a response)", ylabel="truth")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=90)
    print(f"\nfigure: {path}")


def main(args: Args):
    if args.confirm:
        args.seeds = list(CONFIRM)
    chosen = [candidate(text) for text in args.candidates]
    if len(chosen) == 1:
        chosen.insert(0, candidate(f"{chosen[0].stage}.py"))
    if args.show:
        report(read_ledger(args.rows), chosen, args)
        return
    if not chosen:
        fail('name a script, such as ppo_mine.py or "ppo.py --lam 1"')
    if not (args.data / "tldr").exists():
        fail(f"{args.data} has no data: bash quickstart/run.sh --size {args.size} --data-only makes them")
    noisy = candidate(f"{chosen[0].text} --micro-batch-size {NOISE[chosen[0].stage]}")
    noisy.text = chosen[0].text
    jobs = [(one, seed, "") for seed in args.seeds for one in chosen]
    jobs += [(noisy, seed, "A/A") for seed in args.seeds]
    bed, known = bed_of(args), set(read_ledger(args.rows).query("failed == ''")["key"])
    missing = {digest(bed, job[0].text, job[0].version, *job[1:]): job for job in jobs}
    missing = {key: job for key, job in missing.items() if key not in known}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    start = time.time()

    def work(item) -> dict:
        key, job = item
        version = chosen[0].version if job[0] is noisy else job[0].version
        row = {"key": key, "bed": bed, "version": version, "commit": commit.strip(), "date": time.strftime("%Y-%m-%d")}
        row |= make_row(*job, args)
        append(args.rows, row)
        return row

    with ThreadPool(args.jobs) as pool:
        for done, row in enumerate(pool.imap_unordered(work, missing.items()), 1):
            left = (time.time() - start) / done * (len(missing) - done) / 60
            result = row.get("failed") or f"truth {row['truth']:.3f}, KL {row['kl']:.2f}"
            name = f"{row['candidate']} {row['note']}".strip()
            print(f"[{done} of {len(missing)}] {name}, seed {row['seed']}: {result}; {left:.0f} min left", flush=True)
    report(read_ledger(args.rows), chosen, args)


if __name__ == "__main__":
    main(tyro.cli(Args))
