"""What does each implementation detail of the paper cost? Undo it, train on the quick start, and compare the truth.

    bash quickstart/run.sh --size s --data-only                            # once: the generated posts
    python ablations/price.py --seeds 1 2 3 4 --jobs 2                     # make what is missing, then show all
    python ablations/price.py "lambda of 0" --seeds 5 6 7 8                # more seeds for one patch
    python ablations/price.py --show                                       # table and figure alone

price.txt has the patches, each with what we expected before its first row. They are applied to today's scripts and
trained by quickstart/score.py, whose BASE is the papers' tables but for learning rates, batch sizes and episodes. A
patch of the reward model or of SFT is judged by the truth of the PPO policy that follows.

Baselines and their A/A runs come first, seed by seed. The patches follow in the order of price.txt, each on all seeds,
so that an interrupted call leaves comparisons that can be read. A patch is compared with a baseline on the same
processor, because another one's rounding trains another reward model; the study may go on on any.

The rules were set before the first row:
- An effect counts from 0.03 of truth. A patch whose interval lies within ±0.03 makes "no difference of 0.03".
- First look: all patches on seeds 1 to 4, with 99 % intervals. At most ten patches whose interval excludes 0 or whose
  mean is beyond 0.03 get seeds 5 to 8, those with the largest mean difference first; not those whose p after the
  correction is below 0.01 already.
- Last look (--last): 95 % intervals, and a difference needs p below 0.05 after Holm's correction over all rows.
- Intervals and the noise floor are those of paired.py, with one standard deviation for the rows of a stage. Rows with
  more than three times the median spread keep their own.
- "breaks" is a difference after which the mean truth is below that of sft.py's model.
"""

import os
import re
import shlex
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

os.environ["MPLBACKEND"] = "agg"  # the backend that a notebook chooses may not be installed here
ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "quickstart"))

import pandas  # noqa: E402
import score  # noqa: E402
import tyro  # noqa: E402
from eval_helpers import at_least, fail, markdown  # noqa: E402
from filelock import FileLock  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from paired import holm, noise_pairs, summarise  # noqa: E402

PATCHES, WITHOUT_ROW = (ROOT / "ablations/price.txt").read_text().split("\nDetails without a row:\n")
STAGES = ("ppo", "reward", "sft", "dpo")
COUNTS = 0.03  # the smallest difference in truth that counts
MOST = 10  # patches that get more seeds


@dataclass
class Args:
    names: Annotated[list[str], tyro.conf.Positional] = field(default_factory=list)
    """patches to make; default: all. The table shows all that are there"""
    stage: Literal["", "ppo", "reward", "sft", "dpo"] = ""
    """make the patches of this stage only"""
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3, 4])
    """seeds to make"""
    size: Literal["xs", "s", "m"] = "s"
    """size of the base model in quickstart/bases"""
    jobs: int = 1
    """runs at a time, one thread each"""
    show: bool = False
    """print table and figure of the rows that are there; run nothing"""
    last: bool = False
    """the last look: 95 % intervals and Holm's correction in place of 99 % intervals"""
    rows: Path = ROOT / "ablations/results/price.csv"
    """the ledger"""
    figure: Path | None = None
    """file of the figure; default: the ledger's name with .png"""
    runs: Path = ROOT / "runs/price"
    """folder of runs, patched scripts and their data"""
    data: Path = ROOT / "data/quickstart/posts-1"
    """data of the quick start"""


# ==== patches =====================================================================================


@dataclass
class Patch:
    """A block of price.txt. scripts: (script, its flags, [(old text, new text), …]) of each one that differs."""

    name: str
    stage: str
    detail: str
    expected: str
    scripts: list[tuple[str, list[str], list[tuple[str, str]]]]
    undoes: str
    because: str
    first: str
    beside: str = ""

    @property
    def baseline(self) -> str:
        return self.beside or f"{self.stage}.py"


def read_patches(text: str) -> dict[str, Patch]:
    """Return the patches {name: patch} of price.txt."""
    patches = {}
    for block in re.split(r"\n\n+", text.strip())[1:]:
        header, *lines = block.split("\n")
        notes, scripts = {}, []
        for line in lines:
            said = re.match(r"(undoes|because|first|beside): (.*)", line)
            sign = line[:2] if line[:2] in ("- ", "+ ") else ""
            if said:
                notes[said[1]] = said[2]
            elif not sign:
                script, *flags = shlex.split(line)
                scripts.append((script, flags, []))
                before = ""
            else:
                pieces = scripts[-1][2]
                if sign == "- " and before != "- ":
                    pieces.append(([], []))
                pieces[-1][sign == "+ "].append(line[2:])
                before = sign
        joined = [
            (script, flags, [tuple(map("\n".join, both)) for both in pieces]) for script, flags, pieces in scripts
        ]
        patch = Patch(*header.split(" | "), joined, **notes)
        patches[patch.name] = patch
    return patches


def patched(script: str, pieces: list[tuple[str, str]]) -> str:
    """Return a script's text with every piece replaced. Ends with an error if one does not occur exactly once."""
    text = (ROOT / script).read_text()
    for old, new in pieces:
        if text.count(old) != 1:
            fail(f"price.txt: {old!r} occurs {text.count(old)} times in {script}, and not once")
        text = text.replace(old, new)
    return text


def candidate_of(patch: Patch, args: Args) -> score.Candidate:
    """Return the candidate of a patch, with its scripts written."""
    folder = args.runs / "scripts" / re.sub(r"\W+", "_", patch.name)
    commands, recipe = [], []
    for script, flags, pieces in patch.scripts:
        path = ROOT / script
        if pieces:
            path = folder / script
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_text() != patched(script, pieces):  # another call may be reading it
                path.write_text(patched(script, pieces))
        if Path(script).stem in score.BASE:
            commands.append(score.candidate(shlex.join([str(path), *flags])))
        else:
            recipe.append([str(path), *flags])
    one, *others = sorted(commands, key=lambda x: x.stage != patch.stage)
    data = None
    if recipe:
        code = [(score.code_of(Path(path)), flags) for path, *flags in recipe]
        data = args.runs / "data" / score.digest(code, score.data_of(args.data), args.data.name)
    return replace(one, text=patch.name, others=tuple(others), data=data)


def make_data(patch: Patch, one: score.Candidate, args: Args):
    """Make a patch's own data, unless they are there: raw rows by posts.py, if it names that, then tldr_dataset.py."""
    commands = {Path(script).name: (script, flags, pieces) for script, flags, pieces in patch.scripts}
    with FileLock(f"{one.data}.lock"):
        if (one.data / "tldr").exists():
            return
        shutil.rmtree(one.data, ignore_errors=True)
        raw = args.data / "raw"
        if "posts.py" in commands:
            seed = re.fullmatch(r"posts-(\d+)", args.data.name)
            if not seed:
                raise RuntimeError(f"{args.data}: data by posts.py need a folder posts-SEED with its default sizes")
            raw = one.data / "raw"
            flags = [*commands["posts.py"][1], "--seed", seed[1], "--output-dir", raw]
            score.run([ROOT / "quickstart/posts.py", *flags], one.data / "posts.log")
        script, flags, pieces = commands.get("tldr_dataset.py", ("tldr_dataset.py", [], []))
        path = args.runs / "scripts" / re.sub(r"\W+", "_", patch.name) / script if pieces else ROOT / script
        flags = ["--sft-dataset", raw / "posts", "--preference-dataset", raw / "comparisons", "--num-proc", 1, *flags]
        flags += ["--tokenizer", ROOT / "quickstart/bases" / f"nano-{args.size}", "--output-dir", one.data / "tldr"]
        score.run([path, *flags], one.data / "tldr.log")


# ==== table and figure ============================================================================


def differences(patches: dict[str, Patch], ledger: pandas.DataFrame, last: bool) -> pandas.DataFrame:
    """Return a row for each patch that has runs: the means of its own numbers, and what paired.summarise says of its
    differences to its baseline. holm is corrected over all rows of the table."""
    own_rows = ledger[ledger["note"] == ""]
    run = ["seed", "cpu"]
    starts = ledger[(ledger["note"] == "SFT") & (ledger["candidate"] == "sft.py")].set_index(run)["truth"]
    found = {}
    for stage in STAGES:
        pairs, facts, runs = {}, {}, {}
        plain = own_rows[own_rows["candidate"] == f"{stage}.py"]
        noise = noise_pairs(ledger, plain.iloc[0], "truth") if len(plain) else []
        for patch in patches.values():
            own = own_rows[own_rows["candidate"] == patch.name].set_index(run)
            if patch.stage != stage or own.empty:
                continue
            base = own_rows[own_rows["candidate"] == patch.baseline].set_index(run)
            both = (own["truth"] - base["truth"]).dropna()
            pairs[patch.name] = score.one_a_seed(both)
            for name, x in ((patch.name, own.loc[both.index]), (patch.baseline, base)):
                runs[name] = x["truth"].set_axis(x.index.map(str))
            facts[patch.name] = own.loc[both.index, list(score.NUMBERS)].mean().add_prefix("own_").to_dict() | {
                "stage": stage,
                "sft": starts.reindex(both.index).mean(),
                "below": int((own.loc[both.index, "truth"] < starts.reindex(both.index)).sum()),
                "failed": int((own["failed"] != "").sum()),
                "runs": len(own),
            }
        summaries = summarise(pandas.DataFrame(pairs), noise, 0, 0.95 if last else 0.99, pandas.DataFrame(runs))
        for name, seen in facts.items():
            found[name] = seen | summaries.get(name, {"count": len(pairs[name])}) | {"each": pairs[name].tolist()}
    table = pandas.DataFrame(found).T.infer_objects()
    if "p" in table:
        table["holm"] = holm(table["p"].dropna().astype(float), 0)
    return table.sort_values("mean", kind="stable") if "mean" in table else table


def verdict(row: dict, last: bool) -> str:
    """Return what a row of `differences` says, in words."""
    if row["failed"]:
        return f"fails on {row['failed']:.0f} of {row['runs']:.0f} seeds"
    if not row["count"] > 1:
        return "cannot be told: fewer than two seeds"
    if row["noise_runs"] < 2:
        return "cannot be told: fewer than two A/A runs"
    is_told = row["holm"] < 0.05 if last else row["low"] * row["high"] > 0
    if is_told and row["own_truth"] < row["sft"]:
        return "breaks"
    if -COUNTS < row["low"] and row["high"] < COUNTS:
        return "no difference of 0.03"
    if not is_told or abs(row["mean"]) <= row["floor"]:
        return "cannot be told"
    return "worse" if row["mean"] < 0 else "better"


def wanted_seeds(table: pandas.DataFrame) -> list[str]:
    """Return which patches get more seeds after the first look, by the rule at the top of the file."""
    table = table.dropna(subset="mean")
    is_wanted = (table["low"] * table["high"] > 0) | (table["mean"].abs() > COUNTS)
    is_wanted &= table["holm"] >= 0.01
    largest_first = table["mean"].abs().astype(float).sort_values(ascending=False).index
    return [name for name in largest_first if is_wanted[name]][:MOST]


def show(patches: dict[str, Patch], args: Args):
    """Print the table and draw the figure: of the ledger's last bed, each patch as it was last."""
    ledger = score.read_ledger(args.rows)
    ledger = ledger[ledger["size"] == args.size]
    ledger = ledger[ledger["bed"] == ledger["bed"].iloc[-1:].squeeze()]
    ledger = ledger[ledger["version"] == ledger.groupby("candidate")["version"].transform("last")]
    table = differences(patches, ledger, args.last)
    if table.empty or "mean" not in table:
        print(f"{args.rows} has no patch with two seeds beside its baseline")
        return
    is_baseline = ledger["candidate"].isin([f"{stage}.py" for stage in STAGES]) & (ledger["note"] == "")
    plain = ledger[is_baseline | (ledger["note"] == "SFT")]
    for (name, note, cpu), rows in plain.groupby(["candidate", "note", "cpu"], sort=False):
        means = {key: f"{rows[key].mean():.{score.NUMBERS[key]}f}" for key in ("truth", "kl", "words", "eos_rate")}
        print(f"{name} {note}".strip() + f", {len(rows)} seeds on {cpu}:", *(f"{key} {x}" for key, x in means.items()))
    level = 95 if args.last else 99
    lines = []
    for name, row in table.iterrows():
        difference = "{mean:+.3f} ({low:+.3f} to {high:+.3f})".format(**row) if row["count"] > 1 else ""
        lines.append(
            {
                "": name,
                "detail": patches[name].detail,
                "seeds": f"{row['count']:.0f}",
                f"truth less the baseline's, {level} %": difference,
                "p, Holm": f"{row['holm']:.3f}" if row["count"] > 1 else "",
                "seeds below SFT": f"{row['below']:.0f}",
                "KL": f"{row['own_kl']:.2f}",
                "words": f"{row['own_words']:.1f}",
                "EOS": f"{row['own_eos_rate']:.2f}",
                "expected": patches[name].expected,
                "verdict": verdict(row, args.last),
            }
        )
    print("\n" + markdown(lines))
    for stage, rows in table.dropna(subset="mean").groupby("stage", sort=False):
        print(f"noise floor of {stage}: {rows['floor'].max():.3f}; {len(rows)} patches")
    if not args.last and (names := wanted_seeds(table)):
        print(f"\nmore seeds: python ablations/price.py {shlex.join(names)} --seeds 5 6 7 8")
    reasons = [line.split(": ", 1) for line in WITHOUT_ROW.splitlines()]
    print("\nDetails without a row:\n" + markdown([{"detail": x, "why": why} for x, why in reasons]))
    draw(table.dropna(subset="mean"), patches, args)


def draw(table: pandas.DataFrame, patches: dict[str, Patch], args: Args):
    """Draw each patch's difference with its interval, the largest cost on top, its seeds as strokes, KL and length
    beside it. A patch far outside is an arrow with its numbers."""
    edge = max(0.1, 1.2 * table["mean"].abs().quantile(0.75))
    figure = Figure(figsize=(9, 1.2 + 0.24 * len(table)), layout="constrained")
    axis = figure.subplots()
    axis.barh(range(len(table)), 2 * table["floor"], 1, -table["floor"], color="0.88", label="noise floor")
    axis.axvline(0, color="0.3", linewidth=0.8)
    axis.vlines([-COUNTS, COUNTS], -0.6, len(table) - 0.4, color="0.6", linewidth=0.8, linestyle=":")
    for y, row in enumerate(table.to_dict("records")):
        color = f"C{STAGES.index(row['stage'])}"
        shown = {"va": "center", "fontsize": 8}
        if abs(row["mean"]) > edge:
            side = 1 if row["mean"] > 0 else -1
            axis.plot(side * edge * 0.98, y, "<>"[side > 0], color=color, markersize=6)
            where = "right" if side > 0 else "left"
            text = "{mean:+.2f} ({low:+.2f} to {high:+.2f})".format(**row)
            axis.text(side * edge * 0.95, y, text, ha=where, color=color, **shown)
        else:
            axis.plot([max(row["low"], -edge), min(row["high"], edge)], [y, y], color=color, linewidth=1.2)
            axis.plot(row["mean"], y, "o", color=color, markersize=4)
            inside = [x for x in row["each"] if abs(x) < edge]
            axis.plot(inside, [y] * len(inside), "|", color=color, markersize=7, alpha=0.5)
        beside = {"transform": axis.get_yaxis_transform(), "family": "monospace", **shown}
        axis.text(1.02, y, f"{row['own_kl']:6.2f}  {row['own_words']:5.1f}", **beside)
    axis.text(1.02, -1.1, "    KL  words", **beside)
    for i, stage in enumerate(STAGES):
        if stage in set(table["stage"]):
            axis.plot([], [], "o-", color=f"C{i}", label=f"{stage}.py")
    axis.set(xlim=(-edge, edge), ylim=(len(table) - 0.4, -0.6), xlabel="truth less the baseline's")
    axis.set_yticks(range(len(table)), list(table.index), fontsize=8)
    figure.legend(frameon=False, loc="outside lower center", ncols=5, fontsize=8)
    path = args.figure or args.rows.with_suffix(".png")
    figure.savefig(path, dpi=110)
    print(f"figure: {path}")


# ==== main ========================================================================================


def jobs_of(
    patches: dict[str, Patch], ones: dict[str, score.Candidate], args: Args, elsewhere: frozenset[tuple] = frozenset()
) -> list[tuple]:
    """Return the runs (candidate, seed, note) to make: baselines with their A/A runs, seed by seed, then the patches in
    order, each on all seeds. elsewhere: (patch, seed) that are there on other processors alone, and serve."""
    chosen = [patch for patch in patches.values() if args.stage in ("", patch.stage)]
    if args.names:
        chosen = [patch for patch in chosen if patch.name in args.names]
    wanted = {(patch.name, seed) for patch in chosen for seed in args.seeds} - elsewhere
    wanted |= {(patches[name].beside, seed) for name, seed in wanted if patches[name].beside}
    jobs = []
    for seed in args.seeds:
        stages = {patches[name].stage for name, its_seed in wanted if its_seed == seed}
        jobs += [(score.original("sft"), seed, "SFT")] if stages else []
        for stage in (stage for stage in STAGES if stage in stages):
            plain, size = score.original(stage), score.NOISE[stage][0]
            noisy = score.candidate(f"{plain.command[0]} --micro-batch-size {size}")
            jobs += [(plain, seed, ""), (replace(noisy, text=plain.text), seed, f"A/A {size}")]
    return jobs + [(ones[name], seed, "") for name in patches for seed in args.seeds if (name, seed) in wanted]


def main(args: Args):
    at_least(1, args, "jobs")
    patches = read_patches(PATCHES)
    if unknown := [name for name in args.names if name not in patches]:
        fail(f"price.txt has no patch {unknown[0]!r}; it has: {', '.join(patches)}")
    if args.show:
        show(patches, args)
        return
    if not (args.data / "tldr").exists():
        fail(f"{args.data} has no data: bash quickstart/run.sh --size {args.size} --data-only makes them")
    ones = {name: candidate_of(patch, args) for name, patch in patches.items()}
    plain = {one.text: one for one in map(score.original, STAGES)}
    versions = {name: one.version for name, one in (plain | ones).items()}

    def make(one: score.Candidate, seed: int, note: str, settings: score.Args) -> dict:
        if one.data:
            with suppress(RuntimeError):  # without data, the stages fail, and the row says so
                make_data(patches[one.text], one, args)
        return score.make_row(one, seed, note, settings)

    settings = score.Args(size=args.size, jobs=args.jobs, rows=args.rows, runs=args.runs, data=args.data)
    rows = score.read_ledger(args.rows).query("failed == '' and note == ''")
    rows = rows[(rows["bed"] == score.bed_of(settings)) & (rows["version"] == rows["candidate"].map(versions))]
    cpus = rows.groupby(["candidate", "seed"])["cpu"].agg(set)
    elsewhere = frozenset(run for run, found in cpus.items() if score.machine()["cpu"] not in found)
    score.make_missing(jobs_of(patches, ones, args, elsewhere), versions, settings, make)
    show(patches, args)


if __name__ == "__main__":
    main(tyro.cli(Args))
