"""What the paper reports of its reward models, from run folders: table 5, figure 7 and figure 8.

    python eval/rm_report.py --models 1b 2.8b 6.9b --seeds 44413 55513 66613 77713
    python eval/rm_report.py --models xs s m --runs runs/scaling --output quickstart/results/nano/rm_report

Reads {runs}/reward/{model}/{seed}/eval (accuracy.csv, pairs_{split}.csv and reference_rewards.csv, which --run-eval
writes) and those of {runs}/dpo. Writes OUTPUT_table_5.csv (mean and sample standard deviation over seeds),
OUTPUT_calibration.csv (figure 7, right: accuracy by score difference, with the expected calibration error),
OUTPUT_dpo.csv (figure 8: accuracy of the reward model and of DPO's implicit reward), and OUTPUT.md with the tables.
Missing runs are named.

--judged FILE adds the agreement with a judge (figure 7, left; Detail 17). FILE is judge.py's judge_NAME.csv for the
pairs that --write-pairs takes from the preference data, with the chosen response as the summary and the rejected one
as the reference.
"""

import csv
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy
import pandas
import tyro
from datasets import load_from_disk
from eval_helpers import fail, markdown


@dataclass
class Args:
    models: tuple[str, ...] = ("1b", "2.8b", "6.9b")
    """{model} of the run folders"""
    seeds: tuple[int, ...] = (44413, 55513, 66613, 77713)
    runs: str = "runs"
    """folder with reward/{model}/{seed} and dpo/{model}/{seed}"""
    split: str = "validation"
    """split of the preference data for the calibration, the figures and the agreement"""
    bins: int = 10
    """bins of the calibration, with equally many pairs each"""
    judged: str | None = None
    """judge.py's CSV file of the pairs in that split, for the agreement"""
    write_pairs: str | None = None
    """instead: write the pairs of --preference-dataset as a CSV file that judge.py reads"""
    preference_dataset: str = "data/tldr/preference"
    output: str = "runs/rm_report"
    """what the names of all files begin with"""


def read(args: Args, stage: str, name: str) -> dict[tuple[str, int], pandas.DataFrame]:
    """{(model, seed): the table eval/{name}} of the runs that have it; the others are named."""
    paths = {(m, s): Path(args.runs) / stage / m / str(s) / "eval" / name for m in args.models for s in args.seeds}
    if missing := [str(path) for path in paths.values() if not path.exists()]:
        print(f"{len(missing)} of {len(paths)} are not there: {', '.join(missing)}")
    return {key: pandas.read_csv(path, keep_default_na=False) for key, path in paths.items() if path.exists()}


def mean_and_deviation(values) -> str:
    """`mean ± sample standard deviation`, the latter with two values or more."""
    values = numpy.asarray(values, float)
    return f"{values.mean():.3f}" + (f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else "")


def table_5(accuracies: dict, statistics: dict, models: tuple[str, ...]) -> list[dict]:
    """Rows of table 5: statistics of the references' rewards, then accuracy by split and group; a column per model."""
    found: dict[tuple, dict[str, list[float]]] = {}
    for (model, _), frame in statistics.items():
        for name, value in zip(frame["statistic"], frame["value"], strict=True):
            found.setdefault(("rewards of references", "", name), {}).setdefault(model, []).append(float(value))
    for (model, _), frame in accuracies.items():
        for row in frame.to_dict("records"):
            key = row["data"], row["group"], str(row["value"])
            found.setdefault(key, {}).setdefault(model, []).append(row["accuracy"])
    rows = []
    for (data, group, value), cells in found.items():
        cells = {m: mean_and_deviation(cells[m]) if m in cells else "" for m in models}
        rows.append({"data": data, "group": group, "value": value} | cells)
    return rows


def is_hit(frame: pandas.DataFrame) -> pandas.Series:
    """Whether the chosen reward is higher, for each pair (n,). A tie is no hit; the stages mark it."""
    hits = frame["chosen_reward"] > frame["rejected_reward"]
    return hits & ~frame["tie"] if "tie" in frame else hits  # tables of earlier runs have no such column


def calibration(differences: numpy.ndarray, bins: int) -> tuple[list[dict], float]:
    """Differences (n,) of the rewards of chosen and rejected -> rows of a calibration curve, and the expected
    calibration error. A pair's score difference is |difference|, the chance that it gives the higher reward
    1 / (1 + e^-|difference|) (the black line of figure 7), and a hit is a difference above 0. Bins have equally many
    pairs. The error is the mean over pairs of |accuracy - mean chance| of their bin."""
    size, hits = numpy.abs(differences), differences > 0
    chances, order, rows = 1 / (1 + numpy.exp(-size)), numpy.argsort(size, kind="stable"), []
    for index in numpy.array_split(order, min(bins, len(order))):
        row = {
            "pairs": len(index),
            "from": size[index].min(),
            "to": size[index].max(),
            "difference": size[index].mean(),
        }
        rows.append(row | {"chance": chances[index].mean(), "accuracy": hits[index].mean()})
    error = sum(row["pairs"] * abs(row["accuracy"] - row["chance"]) for row in rows) / len(size)
    return rows, float(error)


def judge_agreement(pairs: dict, judged: pandas.DataFrame) -> dict[tuple[str, int], tuple[int, float]]:
    """{(model, seed): (pairs, share of them that reward model and judge decide alike)} over the judge's valid answers
    without ties; `id` in judged is the row of the split."""
    judged = judged[pandas.to_numeric(judged["win"], errors="coerce").isin([0.0, 1.0])]
    rows, wins = judged["id"].astype(int).to_numpy(), judged["win"].astype(float).to_numpy() == 1
    found = {}
    for key, frame in pairs.items():
        if len(rows) == 0 or rows.max() >= len(frame):
            fail(f"--judged: rows up to {max(rows, default=None)}, but the split of {key} has {len(frame)} pairs")
        hits = is_hit(frame).to_numpy()[rows]
        found[key] = len(rows), float((hits == wins).mean())
    return found


def write_pairs(args: Args):
    """The pairs of a split in judge.py's columns, without the end-of-text token that closes a stored response."""
    data, rows = load_from_disk(args.preference_dataset)[args.split], []
    for i, row in enumerate(data.select_columns(["query", "chosen", "rejected"])):
        chosen, rejected = (re.sub(r"(<\|\w+\|>|</s>)$", "", row[side]).strip() for side in ("chosen", "rejected"))
        rows.append({"id": i, "query": row["query"], "response": chosen, "reference": rejected})
    # Python's csv module leaves a text with a lone carriage return unquoted in some versions
    pandas.DataFrame(rows).to_csv(args.write_pairs, index=False, quoting=csv.QUOTE_NONNUMERIC)
    print(f"wrote {len(rows)} pairs of {args.preference_dataset}/{args.split} to {args.write_pairs}")


def main(args: Args):
    if args.write_pairs:
        write_pairs(args)
        return
    accuracies, statistics = read(args, "reward", "accuracy.csv"), read(args, "reward", "reference_rewards.csv")
    pairs = read(args, "reward", f"pairs_{args.split}.csv")
    implicit = read(args, "dpo", f"pairs_{args.split}.csv")
    if not pairs:
        fail(f"{args.runs}/reward: not one run of {', '.join(args.models)} has eval/pairs_{args.split}.csv; --run-eval")
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    models = tuple(m for m in args.models if any(key[0] == m for key in pairs))

    table = table_5(accuracies, statistics, models)
    pandas.DataFrame(table).to_csv(f"{args.output}_table_5.csv", index=False)
    text = "# Reward models\n\n## Table 5: mean ± sample standard deviation over seeds\n\n"
    text += markdown([row for row in table if row["group"] != "policies"])

    differences = {key: (x["chosen_reward"] - x["rejected_reward"]).to_numpy() for key, x in pairs.items()}
    errors = {key: calibration(x, args.bins)[1] for key, x in differences.items()}
    together = {m: numpy.concatenate([x for k, x in differences.items() if k[0] == m]) for m in models}
    curves = {m: calibration(together[m], args.bins)[0] for m in models}  # of all seeds' pairs
    each = {m: mean_and_deviation([x for k, x in errors.items() if k[0] == m]) for m in models}
    pooled = {m: f"{calibration(together[m], args.bins)[1]:.3f}" for m in models}
    rows = [{"model": m} | row for m in models for row in curves[m]]
    pandas.DataFrame(rows).to_csv(f"{args.output}_calibration.csv", index=False)
    text += "\n## Expected calibration error (Detail 18)\n\n" + markdown(
        [{"": "each seed by itself"} | each, {"": "all seeds' pairs together"} | pooled]
    )

    compared = []
    for kind, found in (("reward model", pairs), ("DPO, implicit", implicit)):
        for m in models:
            hits = [is_hit(frame).mean() for key, frame in found.items() if key[0] == m]
            if hits:
                sd = float(numpy.std(hits, ddof=1)) if len(hits) > 1 else 0.0
                compared.append(
                    {"kind": kind, "model": m, "seeds": len(hits), "mean": float(numpy.mean(hits)), "sd": sd}
                )
    pandas.DataFrame(compared).to_csv(f"{args.output}_dpo.csv", index=False)
    text += f"\n## Accuracy on {args.split} (figure 8)\n\n" + markdown(compared)

    if args.judged:
        found = judge_agreement(pairs, pandas.read_csv(args.judged))
        rows = [{"model": m, "seed": s, "pairs": n, "agreement": share} for (m, s), (n, share) in found.items()]
        pandas.DataFrame(rows).to_csv(f"{args.output}_agreement.csv", index=False)
        text += "\n## Agreement with the judge (Detail 17; figure 7, left)\n\n" + markdown(rows)
    Path(f"{args.output}.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
