"""Report on one chain of the quickstart: SFT, PPO and DPO judged by the truth, and how far the reward model has it.

    python quickstart/report.py --raw data/quickstart/raw --preference-dataset data/quickstart/tldr/preference \
        --runs runs --model nano-s --seed 1

reads the run folders {runs}/{sft,reward,ppo,dpo}/{model}/{seed}, made with --run-eval and eval/samples.py, and writes
    table.csv              row, metric, value: every number of the report, not rounded
    table.md               the same as tables
    times.csv              seconds of training of each stage; no other file depends on the clock
    samples.md             ten posts with what each policy wrote about them and its true score
    learning_curves.png    PPO against episodes (figure 10 of the paper), SFT, reward model and DPO
    win_rates.png          win rates against the reference summaries (figure 1)

The judge is the truth of `truth.py`, which no training stage has seen. Intervals are bootstrap intervals over posts.
Runs of one seed give one table.csv, to the last digit.
"""

import csv
import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib
import numpy
import pandas
import tyro
from datasets import load_from_disk
from PIL import Image
from rich.console import Console
from rich.table import Table
from rouge_score.rouge_scorer import RougeScorer

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

STAGES = {"SFT": "sft", "reward": "reward", "PPO": "ppo", "DPO": "dpo"}
POLICIES = ("SFT", "PPO", "DPO")
YARDSTICKS = ("near_perfect", "copied_title")  # a good and a lazy policy, known without training
EOS = "<|endoftext|>"  # ends the summaries of the preference data set; it is no word
PANELS = [  # stage, metric, what it shows
    ("PPO", "objective/rlhf_reward", "PPO: RLHF reward"),
    ("PPO", "objective/kl", "PPO: KL to SFT (nats)"),
    ("PPO", "objective/score", "PPO: score of the reward model"),
    ("PPO", "response/eos_rate", "PPO: share of responses with EOS"),
    ("PPO", "response/length", "PPO: response length (tokens)"),
    ("SFT", "loss/train", "SFT: loss (nats per token)"),
    ("reward", "accuracy/train", "reward model: accuracy, noisy labels"),
    ("DPO", "accuracy/train", "DPO: accuracy, noisy labels"),
]


@dataclass
class Args:
    raw: str = "data/quickstart/raw"
    """folder of the raw posts and yardsticks, from quickstart/posts.py"""
    preference_dataset: str = "data/quickstart/tldr/preference"
    """folder of the pre-tokenised comparisons, from tldr_dataset.py"""
    runs: str = "runs"
    """folder of the run folders {stage}/{model}/{seed}"""
    model: str = "nano-s"
    """the {model} of the run folders"""
    seed: int = 1
    """the {seed} of the run folders"""
    output_dir: str | None = None
    """folder to write, files of an earlier report are replaced; default {runs}/report/{model}/{seed}"""


# ---- the truth: the same text as in truth.py ------------------------------------------------------------------------

# fmt: off
FACTS = {
    "person": ["sister", "brother", "mother", "father", "cousin", "uncle", "aunt", "roommate", "boss", "coworker",
               "girlfriend", "boyfriend", "landlord", "neighbor", "teacher", "wife", "husband", "stepmom", "grandpa",
               "grandma", "nephew", "professor", "classmate", "babysitter"],
    "age": [str(age) for age in range(18, 60)],
    "event": ["broke", "lost", "sold", "stole", "hid", "burned", "scratched", "smashed", "flooded", "painted", "buried",
              "dropped", "pawned", "ruined", "donated", "traded", "stained", "crushed", "kicked", "damaged", "returned",
              "locked", "melted", "borrowed"],
    "object": ["laptop", "bike", "car", "phone", "guitar", "couch", "jacket", "camera", "piano", "ring", "necklace",
               "backpack", "tablet", "wallet", "scooter", "drum", "mirror", "lamp", "carpet", "helmet", "violin",
               "tent", "kayak", "printer", "fridge", "blender", "diary", "passport", "skateboard", "telescope"],
    "feeling": ["angry", "sad", "scared", "confused", "guilty", "tired", "jealous", "hurt", "ashamed", "anxious",
                "annoyed", "lonely", "shocked", "embarrassed", "bitter", "worried", "upset", "furious", "helpless",
                "betrayed"],
    "question": ["move out", "call the police", "demand an apology", "forgive them", "ask for money", "see a lawyer",
                 "stay quiet", "get revenge", "write a letter", "cut contact", "buy a new one", "talk it over",
                 "set a trap", "tell everyone", "let it go", "take a break", "wait a month", "start a fight",
                 "pretend nothing happened", "find a therapist"],
}
# fmt: on
FREE_WORDS = 24  # a summary of up to so many words has no length penalty
WORD_PENALTY = 0.02  # for each word beyond
REPEAT_PENALTY = 0.1  # for each run of three words that the summary already had


def find_facts(text: str) -> dict[str, set[str]]:
    """The values of each kind of fact that a text mentions."""
    text = text.lower()
    found = {kind: set(re.findall(rf"\b(?:{'|'.join(values)})\b", text)) for kind, values in FACTS.items()}
    found["age"] = set(re.findall(r"\b\d\d(?!\d)", text)) & set(FACTS["age"])  # also 24F and 24yo
    return found


def score(post: str, summary: str) -> float:
    """The true score of a summary, any text, with n facts in the post (an error where there are none):

    (covered - wrong) / n - WORD_PENALTY for each word beyond FREE_WORDS - REPEAT_PENALTY for each repeated three words

    A fact is covered when post and summary name the same value, and wrong when only the summary names it.
    """
    truth, said = find_facts(post), find_facts(summary)
    n = sum(len(values) for values in truth.values())
    if n == 0:
        raise ValueError(f"no fact in the post, so that no summary of it can be scored: {post[:80]!r}")
    covered = sum(len(said[kind] & truth[kind]) for kind in FACTS)
    wrong = sum(len(said[kind] - truth[kind]) for kind in FACTS)
    words = re.findall(r"\w+", summary.lower())
    runs = list(zip(words, words[1:], words[2:], strict=False))
    length = WORD_PENALTY * max(0, len(words) - FREE_WORDS)
    return (covered - wrong) / n - length - REPEAT_PENALTY * (len(runs) - len(set(runs)))


def judge(post: str, summary: str, other: str) -> float:
    """1 where the truth prefers `summary` to `other`, 0 where it prefers `other`, 0.5 where they score the same."""
    gap = score(post, summary) - score(post, other)
    return 0.5 if abs(gap) < 1e-9 else float(gap > 0)


# ---- helpers --------------------------------------------------------------------------------------------------------


def fail(message: str):
    """End the process with one clear message on standard error and exit code 1."""
    raise SystemExit(f"error: {message}")


def read_rows(path: Path, columns: list[str]) -> list[dict]:
    """The rows of a .jsonl or .csv file (there every value is text), of which each must have the columns."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [json.loads(line) for line in file] if path.suffix == ".jsonl" else list(csv.DictReader(file))
    if not rows:
        fail(f"{path} has no row")
    for column in columns:
        if any(row.get(column) is None for row in rows):
            fail(f"{path} has a row without {column}; is it cut off, or of another version?")
    return rows


def bootstrap_interval(values: list[float], resamples: int) -> tuple[float, float]:
    """95 % interval of the mean of values (n,): 2.5 and 97.5 % quantiles of the means of `resamples` draws of n values
    with replacement. Every call draws the same places."""
    places = numpy.random.default_rng(1).integers(len(values), size=(resamples, len(values)))
    low, high = numpy.quantile(numpy.array(values)[places].mean(1), [0.025, 0.975])
    return float(low), float(high)


def agreement(gaps: list[float], better: list[float]) -> float:
    """Share of the reward gaps (n,) that are above 0 where `better` (n,) is 1 and below 0 where it is 0; those where it
    is 0.5 are left out. A gap of 0 agrees with neither."""
    hits = [gap > 0 if side == 1 else gap < 0 for gap, side in zip(gaps, better, strict=True) if side != 0.5]
    return fmean(hits) if hits else float("nan")


def running_mean(values: list[float]) -> list[float]:
    """Mean of each value and those before it, over a 20th of the curve (over fewer at its start)."""
    width = max(1, len(values) // 20)
    return [fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def shown(value) -> str:
    """A cell of a table: 3 digits of a float, nothing for None."""
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def markdown_table(header: list[str], rows: list[list]) -> str:
    """A Markdown table; line breaks become spaces and bars are escaped, so that no cell breaks it."""
    lines = [header, ["---"] * len(header), *([shown(value) for value in row] for row in rows)]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def main(args: Args):
    # ---- read: everything is checked before anything is written -----------------------------------------------------
    folders = {name: Path(args.runs, stage, args.model, str(args.seed)) for name, stage in STAGES.items()}
    output_dir = Path(args.output_dir or Path(args.runs, "report", args.model, str(args.seed)))
    posts_path, yardsticks_path = (Path(args.raw, kind, "validation.jsonl") for kind in ("posts", "yardsticks"))
    needed = dict.fromkeys([posts_path, yardsticks_path], f"python quickstart/posts.py --output-dir {args.raw}")
    needed[Path(args.preference_dataset, "dataset_dict.json")] = "python tldr_dataset.py --preference-dataset ..."
    splits = ["validation"] + ["validation_cnndm"] * Path(args.preference_dataset, "validation_cnndm").exists()
    for name, folder in folders.items():
        tables = ["samples_validation"] if name in POLICIES else [f"pairs_{split}" for split in splits]
        for path in (folder / "metrics.jsonl", *(folder / "eval" / f"{table}.csv" for table in tables)):
            made = f"{STAGES[name]}.py --seed {args.seed} --output-dir {folder} ..."
            made += " --run-eval" * (path.stem.startswith("pairs_"))
            needed[path] = f"python eval/samples.py {folder}" if path.stem.startswith("samples_") else f"python {made}"
    missing = [f"\n  {path}, made by  {command}" for path, command in needed.items() if not path.exists()]
    if missing:
        fail(f"{len(missing)} of {len(needed)} files are missing:{''.join(missing)}")

    all_posts = {row["id"]: row for row in read_rows(posts_path, ["id", "post", "summary"])}
    yardsticks = {row["id"]: row for row in read_rows(yardsticks_path, ["id", *YARDSTICKS])}
    samples = {}
    for name in POLICIES:
        path = folders[name] / "eval" / "samples_validation.csv"
        samples[name] = read_rows(path, ["id", "response", "reference", "response_tokens", "has_eos", "rougeL"])
        ids = [row["id"] for row in samples["SFT"]]
        if [row["id"] for row in samples[name]] != ids:
            fail(f"{path} is about other posts than the samples of SFT; run both stages on one --dataset")
        for row in samples[name]:
            post = all_posts.get(row["id"])
            if post is None or row["id"] not in yardsticks or row["reference"].strip() != post["summary"].strip():
                fail(f"{path}: {row['id']} with that reference is no post of {args.raw}; run the stages on its posts")
    posts = [all_posts[i] for i in ids]

    pairs, rewards, gaps = {}, {}, {}
    data = load_from_disk(args.preference_dataset)
    for split in splits:
        columns = [column for column in ("query", "chosen", "rejected", "policies") if column in data[split].features]
        pairs[split] = data[split].select_columns(columns).to_list()
        for name in ("reward", "DPO"):
            path = folders[name] / "eval" / f"pairs_{split}.csv"
            if not path.exists():  # DPO may have none
                continue
            rewards[name, split] = rows = read_rows(path, ["chosen_reward", "rejected_reward"])
            if len(rows) != len(pairs[split]):
                fail(f"{path} has {len(rows)} rows, {args.preference_dataset} has {len(pairs[split])} pairs of {split}")
            for row, pair in zip(rows, pairs[split], strict=True):
                if row.get("policies") and row["policies"] != pair.get("policies"):
                    fail(f"{path} is about other pairs than {args.preference_dataset}; run the stage on that data")
            gaps[name, split] = [float(row["chosen_reward"]) - float(row["rejected_reward"]) for row in rows]

    metrics = {name: read_rows(folder / "metrics.jsonl", ["update"]) for name, folder in folders.items()}
    times = [{"stage": STAGES[name], "seconds": rows[-1].get("time/total")} for name, rows in metrics.items()]
    curves = {}
    for name, key, title in PANELS:
        curves[title] = [(row["episode"], row[key]) for row in metrics[name] if key in row]
        if not curves[title]:
            fail(f"{folders[name] / 'metrics.jsonl'} has no {key}")

    # ---- policies ---------------------------------------------------------------------------------------------------
    texts = {name: [row["response"] for row in rows] for name, rows in samples.items()}
    texts |= {name: [yardsticks[i][name] for i in ids] for name in YARDSTICKS}
    texts["reference"] = references = [post["summary"] for post in posts]
    rouge, values, truths = RougeScorer(["rougeL"]), {}, {}
    for name, summaries in texts.items():
        told = list(zip(posts, summaries, references, strict=True))
        truths[name] = [score(post["post"], summary) for post, summary, _ in told]
        wins = [judge(post["post"], summary, reference) for post, summary, reference in told]
        if name in samples:
            rouges = [float(row["rougeL"]) for row in samples[name]]
        else:
            rouges = [rouge.score(reference, summary)["rougeL"].fmeasure for _, summary, reference in told]
        low, high = bootstrap_interval(wins, 2_000)
        values[name] = {"rougeL": fmean(rouges), "truth": fmean(truths[name])}
        values[name] |= {"win_rate": fmean(wins), "win_rate_low": low, "win_rate_high": high}
        values[name]["words"] = fmean(len(re.findall(r"\w+", summary)) for summary in summaries)  # as the truth counts
        if name in samples:
            values[name]["tokens"] = fmean(int(row["response_tokens"]) for row in samples[name])
            values[name]["eos_rate"] = fmean(row["has_eos"] == "True" for row in samples[name])
    values["PPO"]["share_of_near_perfect"] = values["PPO"]["truth"] / values["near_perfect"]["truth"]
    for name in ("PPO", "DPO"):  # paired: both wrote about the same posts
        gains = [ours - sft for ours, sft in zip(truths[name], truths["SFT"], strict=True)]
        low, high = bootstrap_interval(gains, 10_000)
        difference = {"truth_difference": fmean(gains), "truth_difference_low": low, "truth_difference_high": high}
        values[f"{name}-SFT"] = difference

    # ---- facts by kind ----------------------------------------------------------------------------------------------
    held = [find_facts(post["post"]) for post in posts]
    per_kind = []
    for kind in FACTS:
        having = [i for i, facts in enumerate(held) if facts[kind]]
        per_kind.append([kind, len(having)])
        for name in POLICIES:
            said = [find_facts(text)[kind] for text in texts[name]]
            right = [bool(said[i] & held[i][kind]) for i in having]
            wrong = [bool(ours - facts[kind]) for ours, facts in zip(said, held, strict=True)]
            values[name] |= {f"{kind}_right": fmean(right)} if right else {}
            values[name] |= {f"{kind}_wrong": fmean(wrong)}
            per_kind[-1] += [values[name].get(f"{kind}_right"), values[name][f"{kind}_wrong"]]

    # ---- rewards: agreement with the labels as given (noisy) and with the truth (clean) -----------------------------
    notes, per_policies = [], []
    for split, suffix in zip(splits, ("", "_cnndm"), strict=False):
        both = [(p["query"], p["chosen"].removesuffix(EOS), p["rejected"].removesuffix(EOS)) for p in pairs[split]]
        better = [judge(query, chosen, rejected) for query, chosen, rejected in both]
        notes.append(f"{len(better)} pairs of {split} ({better.count(0.5)} of equal truth left out of clean)")
        for name, row in (("reward", "reward"), ("DPO", "dpo_implicit")):
            if (name, split) in gaps:
                accuracies = values.setdefault(row, {})
                accuracies[f"accuracy_noisy{suffix}"] = agreement(gaps[name, split], [1] * len(better))
                accuracies[f"accuracy_clean{suffix}"] = agreement(gaps[name, split], better)
        groups = [row.get("policies") for row in rewards["reward", split]]
        for group in sorted(set(groups) - {None}) if split == "validation" else []:
            rows = [i for i, found in enumerate(groups) if found == group]
            clean = agreement([gaps["reward", split][i] for i in rows], [better[i] for i in rows])
            per_policies.append([group or "null", len(rows), clean])

    # ---- tables -----------------------------------------------------------------------------------------------------
    share = f"PPO has {shown(values['PPO']['share_of_near_perfect'])} of the truth of near_perfect"
    header = ["rougeL", "truth", "win_rate", "win_rate_low", "win_rate_high", "words", "tokens", "eos_rate"]
    tables = [(f"{len(posts)} posts of validation; {share}", list(texts), header)]
    tables += [("True score above SFT, with its 95 % interval", ["PPO-SFT", "DPO-SFT"], list(values["PPO-SFT"]))]
    tables += [(f"Accuracy on {'; '.join(notes)}", ["reward", "dpo_implicit"], list(values["reward"]))]
    for i, (title, rows, header) in enumerate(tables):
        cells = [[row, *(values[row].get(key) for key in header)] for row in rows if row in values]
        tables[i] = (title, ["", *header], cells)
    title = "Facts by kind: share of the posts that have it whose summary says it, of all whose summary says another"
    header = ["kind", "posts", *(f"{name} {what}" for name in POLICIES for what in ("right", "wrong"))]
    tables.append((title, header, per_kind))
    title = "Clean accuracy of the reward model on each pair of policies, validation"
    tables += [(title, ["policies", "pairs", "accuracy_clean"], per_policies)] if per_policies else []
    timing = ("Seconds of training", ["stage", "seconds"], [list(row.values()) for row in times])
    for title, header, rows in [*tables, timing]:
        table = Table(*header, title=title, title_justify="left")
        for row in rows:
            table.add_row(*(shown(value) for value in row))
        Console(width=140).print(table)

    # ---- samples: ten evenly spaced rows ----------------------------------------------------------------------------
    samples_text = f"# Samples of {args.model}, seed {args.seed}\n"
    count = min(10, len(posts))
    for i in [n * len(posts) // count for n in range(count)]:
        rows = [[name, texts[name][i], truths[name][i]] for name in ("reference", *POLICIES)]
        quoted = posts[i]["post"].replace("\n", "\n> ")
        samples_text += f"\n## {ids[i]}\n\n> {quoted}\n\n{markdown_table(['', 'summary', 'true score'], rows)}"

    # ---- figures ----------------------------------------------------------------------------------------------------
    curves_figure, axes = plt.subplots(2, 4, figsize=(14, 6))
    for axis, (title, points) in zip(axes.flat, curves.items(), strict=True):
        episodes, heights = zip(*points, strict=True)
        axis.plot(episodes, heights, alpha=0.35, linewidth=0.8)
        axis.plot(episodes, running_mean(heights), color="C0")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("episodes")
    bars_figure, axis = plt.subplots(figsize=(6, 4))
    for i, name in enumerate(("SFT", "DPO", "PPO")):
        row = values[name]
        axis.bar(name, row["win_rate"], color="C0", width=0.6)
        axis.vlines(i, row["win_rate_low"], row["win_rate_high"], color="black")
        axis.annotate(shown(row["win_rate"]), (i + 0.05, row["win_rate_high"] + 0.01))
    for i, name in enumerate(YARDSTICKS):
        axis.axhline(values[name]["win_rate"], linestyle="--", color=f"C{i + 1}", label=name)
    axis.axhline(0.5, color="grey", linewidth=0.8, label="as good as the reference")
    axis.set(ylim=(0, 1.08), ylabel="win rate against the reference")
    axis.legend(fontsize=8, ncols=3, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))

    # ---- write: table.csv last, so that a report that has it is whole -----------------------------------------------
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "table.csv").unlink(missing_ok=True)
    parts = [f"{title}:\n\n{markdown_table(header, rows)}" for title, header, rows in tables]
    (output_dir / "table.md").write_text("\n".join(parts), encoding="utf-8")
    (output_dir / "samples.md").write_text(samples_text, encoding="utf-8")
    for name, figure in (("learning_curves.png", curves_figure), ("win_rates.png", bars_figure)):
        figure.tight_layout()
        figure.savefig(output_dir / name, dpi=80)
        Image.open(output_dir / name).quantize(64).save(output_dir / name)  # a third of the size
        plt.close(figure)
        print(output_dir / name)
    pandas.DataFrame(times).to_csv(output_dir / "times.csv", index=False)
    long = [(row, metric, value) for row, each in values.items() for metric, value in each.items()]
    pandas.DataFrame(long, columns=["row", "metric", "value"]).to_csv(output_dir / "table.tmp", index=False)
    (output_dir / "table.tmp").rename(output_dir / "table.csv")


if __name__ == "__main__":
    main(tyro.cli(Args))
