"""What the paper reports of its reward models, from run folders: table 5 and figure 7.

    python eval/rm_report.py --models 1b 2.8b 6.9b --seeds 44413 55513 66613 77713

Reads accuracy.csv, pairs_validation.csv and reference_rewards.csv in {runs}/reward/{model}/{seed}/eval, which
--run-eval writes. Missing runs are named. Writes OUTPUT.md (table 5 and the expected calibration error) and
OUTPUT_calibration.csv (figure 7, right: accuracy by score difference).

--judged FILE adds OUTPUT_agreement.csv, the agreement with a judge (figure 7, left; Detail 17). FILE is judge.py's
judge_NAME.csv for the pairs that --write-pairs takes from the preference data, with the chosen response as the summary
and the rejected one as the reference. The reward models must be trained on the same --preference-dataset, because pairs
are matched by their row. Without --judged, an earlier OUTPUT_agreement.csv is removed.
"""

import csv
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mode

import numpy
import pandas
import tyro
from datasets import DatasetDict, load_dataset, load_from_disk
from eval_helpers import fail, markdown, or_fail, with_sd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for ppo, which only --judged needs


@dataclass
class Args:
    models: tuple[str, ...] = ("1b", "2.8b", "6.9b")
    """{model} of the run folders"""
    seeds: tuple[int, ...] = (44413, 55513, 66613, 77713)
    runs: str = "runs"
    """folder with reward/{model}/{seed}"""
    judged: str | None = None
    """judge.py's CSV file of the validation pairs, for the agreement"""
    write_pairs: str | None = None
    """only write the validation pairs of --preference-dataset to this CSV file, which judge.py reads"""
    policies: bool = False
    """table 5 also by the pair of policies, of which the paper's validation split has 241"""
    preference_dataset: str = "data/tldr/preference"
    """preference data: folder or Hub id[@revision]"""
    output: str = "runs/rm_report"
    """path that the names of all files begin with"""


def read(args: Args, name: str) -> dict[tuple[str, int], pandas.DataFrame]:
    """Return {(model, seed): the table eval/{name}} of the reward models that have it, and print the others."""
    paths = {(m, s): Path(args.runs, "reward", m, str(s), "eval", name) for m in args.models for s in args.seeds}
    if missing := [str(path) for path in paths.values() if not path.exists()]:
        print(f"{len(missing)} of {len(paths)} are not there: {', '.join(missing)}")
    return {key: pandas.read_csv(path, keep_default_na=False) for key, path in paths.items() if path.exists()}


def table_5(accuracies: dict, statistics: dict, models: tuple[str, ...], policies: bool) -> list[dict]:
    """Return rows of table 5: statistics of the references' rewards, then accuracy by split and group (by pair of
    policies only if asked); a column per model with mean and standard deviation over seeds."""
    frames = []
    for (model, _), frame in statistics.items():
        frame = frame.rename(columns={"value": "accuracy", "statistic": "value"})
        frames.append(frame.assign(model=model, data="rewards of references", group=""))
    for (model, _), frame in accuracies.items():
        frames.append(frame[policies | (frame["group"] != "policies")].assign(model=model))
    table = pandas.concat(frames).astype({"value": str, "accuracy": float})
    table = table.pivot_table("accuracy", ["data", "group", "value"], "model", with_sd, sort=False)
    return table.reindex(columns=models).fillna("").reset_index().to_dict("records")


def calibration(differences: numpy.ndarray, bins: int = 10) -> tuple[list[dict], float]:
    """Return rows of a calibration curve and the expected calibration error, for differences (n,) of the rewards of
    chosen and rejected. A pair's score difference is |difference|, its chance 1 / (1 + e^-|difference|) (the black line
    of figure 7), and a hit is a difference above 0. Bins have equally many pairs. The error is the mean over pairs of
    |accuracy - mean chance| of their bin."""
    size, hits = numpy.abs(differences), differences > 0
    chances, order, rows = 1 / (1 + numpy.exp(-size)), numpy.argsort(size, kind="stable"), []
    for index in numpy.array_split(order, min(bins, len(order))):
        row = {"pairs": len(index), "from": size[index].min(), "to": size[index].max()}
        row["difference"] = size[index].mean()
        rows.append(row | {"chance": chances[index].mean(), "accuracy": hits[index].mean()})
    error = sum(row["pairs"] * abs(row["accuracy"] - row["chance"]) for row in rows) / len(size)
    return rows, float(error)


def judge_agreement(pairs: dict, judged: pandas.DataFrame) -> dict[tuple[str, int], tuple[int, float]]:
    """Return {(model, seed): (pairs, share of them that reward model and judge decide alike)} over the judge's valid
    answers without ties. `id` in judged is the row of the split. Equal rewards (`tie`) count as a preference for the
    rejected response."""
    judged = judged[pandas.to_numeric(judged["win"], errors="coerce").isin([0.0, 1.0])]
    rows, wins = judged["id"].astype(int).to_numpy(), judged["win"].astype(float).to_numpy() == 1
    agreements = {}
    for key, frame in pairs.items():
        hits = ((frame["chosen_reward"] > frame["rejected_reward"]) & ~frame["tie"]).to_numpy()[rows]
        agreements[key] = len(rows), float((hits == wins).mean())
    return agreements


def load_pairs(args: Args) -> DatasetDict:
    """Load the preference data from a folder or from a Hub id[@revision]."""
    path = args.preference_dataset
    name, _, revision = path.partition("@")
    with or_fail(f"--preference-dataset {path}: no data set with train and validation pairs; see tldr_dataset.py"):
        data = load_from_disk(path) if Path(path).exists() else load_dataset(name, revision=revision or None)
        for split in ("train", "validation"):
            data[split].select_columns(["query", "chosen", "rejected"])[0]  # fails where something is missing
    return data


def check_judged(args: Args, pairs: dict, judged: pandas.DataFrame):
    """End with an error unless the judge and each reward model have the validation pairs of --preference-dataset."""
    from ppo import content_digest  # here, because nothing else needs torch

    data, path, key = load_pairs(args), args.preference_dataset, "preference_dataset digest"
    digest, rows, counts = content_digest(data["train"]), len(data["validation"]), {args.judged: len(judged)}
    for (model, seed), frame in pairs.items():
        run = Path(args.runs, "reward", model, str(seed))
        counts[run] = len(frame)
        with or_fail(f"{run}/args.json does not tell which pairs this reward model was trained on"):
            known = json.loads((run / "args.json").read_text())
            same_path = Path(known["preference_dataset"]).resolve() == Path(path).resolve()  # older runs have no digest
        if not (known[key] == digest if key in known else same_path):
            fail(f"{run} was trained on other data than --preference-dataset {path}: {known['preference_dataset']}")
    for source, count in counts.items():
        if count != rows:
            fail(f"{source} has {count} pairs, and {path} {rows}: write them with --write-pairs, and judge them again")


def write_pairs(args: Args):
    """Write the validation pairs in judge.py's columns, with tokens if the data has them, and texts without EOS. EOS is
    what most texts end with, from their last < or [ on."""
    data = load_pairs(args)["validation"]
    eos = mode(re.search(r"([<\[][^\s<\[]*)?$", text)[0] for side in ("chosen", "rejected") for text in data[side])
    rows = []
    for i, row in enumerate(data):
        texts = {"response": row["chosen"].removesuffix(eos), "reference": row["rejected"].removesuffix(eos)}
        rows.append({"id": i, "query": row["query"]} | texts)
        if "chosen_token" in row:
            rows[-1]["query_token"] = row["query_token"][-row["query_token_len"] :]
            rows[-1]["response_token"] = row["chosen_token"][: row["chosen_token_len"]]
            rows[-1]["reference_token"] = row["rejected_token"][: row["rejected_token_len"]]
    # Python's csv module leaves a text with a lone carriage return unquoted in some versions
    pandas.DataFrame(rows).to_csv(args.write_pairs, index=False, quoting=csv.QUOTE_NONNUMERIC)
    print(f"wrote {len(rows)} pairs of {args.preference_dataset} to {args.write_pairs}")


def main(args: Args):
    if args.write_pairs:
        write_pairs(args)
        return
    accuracies, statistics = read(args, "accuracy.csv"), read(args, "reference_rewards.csv")
    pairs = read(args, "pairs_validation.csv")
    if not pairs:
        fail(f"{args.runs}/reward: not one run of {', '.join(args.models)} has eval/pairs_validation.csv; --run-eval")
    if args.judged:
        with or_fail(f"--judged {args.judged} cannot be read. judge.py writes it"):
            judged = pandas.read_csv(args.judged).dropna(subset=["id"])
        check_judged(args, pairs, judged)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    models = tuple(m for m in args.models if any(key[0] == m for key in pairs))
    text = "# Reward models\n\n## Table 5: mean ± sample standard deviation over seeds\n\n"
    text += markdown(table_5(accuracies, statistics, models, args.policies))

    differences = {key: (x["chosen_reward"] - x["rejected_reward"]) * ~x["tie"] for key, x in pairs.items()}
    curves, errors = [], {}
    for m in models:
        of_model = [x.to_numpy() for key, x in differences.items() if key[0] == m]
        errors[m] = with_sd([calibration(x)[1] for x in of_model])
        curves += [{"model": m} | row for row in calibration(numpy.concatenate(of_model))[0]]
    pandas.DataFrame(curves).to_csv(f"{args.output}_calibration.csv", index=False)
    text += "\n## Expected calibration error (Detail 18), mean over seeds\n\n" + markdown([errors])

    Path(f"{args.output}_agreement.csv").unlink(missing_ok=True)
    if args.judged:
        agreements = judge_agreement(pairs, judged)
        rows = [{"model": m, "seed": s, "pairs": n, "agreement": share} for (m, s), (n, share) in agreements.items()]
        pandas.DataFrame(rows).to_csv(f"{args.output}_agreement.csv", index=False)
    Path(f"{args.output}.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
