"""Steps and results of llama2/rounds.sh, Llama 2's loop: pairs of the newest policies, a reward model, a policy, again.

    python llama2/rounds.py show                                                   # tables and figure of the results
    python llama2/rounds.py pairs runs/llama2_rounds/s/1/graded/3/labelled         # three pairs with their truth

The other commands are steps of rounds.sh. `merge` joins the pairs of all rounds so far: labels of training pairs are
noisy, and those of validation pairs, which are the newest round's, are the truth's. `measure` adds a policy's row to
rounds.csv, and `accuracies` adds to accuracy.csv how each reward model of an arm decides each round's validation pairs.
`one-commit` refuses runs and rows of another commit.
"""

import os
import sys
import time
from pathlib import Path
from typing import Annotated

os.environ["MPLBACKEND"] = "agg"  # the backend that a notebook chooses may not be installed here
ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / folder) for folder in (".", "eval", "quickstart")]

import metric  # noqa: E402
import pandas  # noqa: E402
import score  # noqa: E402
import torch  # noqa: E402
import tyro  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from datasets import DatasetDict, concatenate_datasets, load_from_disk  # noqa: E402
from eval_helpers import fail, markdown, or_fail, wins, with_sd  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from paired import summarise  # noqa: E402

import ppo  # noqa: E402
from tldr_dataset import unfinished_folder  # noqa: E402

RESULTS = ROOT / "llama2/results"
ARMS = {
    "sft": "SFT",
    "graded": "rounds, margins by grade",
    "plain": "rounds, no margins",
    "once": "all pairs from the SFT policy",
    "ensemble": "the same, five reward models",
}
PAIRED = "{mean:+.3f} ({low:+.3f} to {high:+.3f}), {count:.0f} seeds, p {holm:.3f}, would have shown {power:.3f}"
GRADES = ["significantly", "better", "slightly", "negligibly"]
NUMBERS = {"truth": 3, "win_rate": 3, "wrong_facts": 2, "words": 1, "kl": 2, "score": 2, "accuracy": 3}


def merge(labelled: list[Path], to: Path, count: int):
    """Join the pairs of several rounds, each a folder of gold_label.py with noise_0 and noise_25. count: of each
    round's training pairs, keep so many, the first, so that all arms have as many. Ends with an error if one has
    fewer."""
    train = []
    for folder in labelled:
        noisy = load_from_disk(folder / "noise_25")["train"]
        if len(noisy) < count:
            fail(f"{folder} has {len(noisy)} training pairs, fewer than --count {count}: label more prompts")
        train.append(noisy.take(count))
    joined = DatasetDict(train=concatenate_datasets(train))
    joined["validation"] = load_from_disk(labelled[-1] / "noise_0")["validation"]
    with unfinished_folder(to) as folder:
        joined.save_to_disk(folder / "finished" / "preference")
    print(f"{to}: {len(joined['train'])} pairs of {len(labelled)} rounds")


def one_commit(runs: Path, rows: list[Path]):
    """End with an error if the runs or the rows of some files that are there were made by another commit."""
    tables = [pandas.read_csv(file, dtype={"commit": str}, keep_default_na=False) for file in rows if file.exists()]
    score.one_commit(runs, [commit for table in tables for commit in table["commit"]])


# ---- measuring ---------------------------------------------------------------------------------------------------


def append(rows: list[dict], file: Path):
    """Add rows to a CSV file, with commit and date."""
    file.parent.mkdir(parents=True, exist_ok=True)
    made = {"commit": score.commit_of(), "date": time.strftime("%Y-%m-%d"), "cpu": score.machine()["cpu"]}
    table = pandas.DataFrame(rows).assign(**made)
    table.to_csv(file, mode="a", header=not file.exists(), index=False, float_format="%.6g")


def pair_scores(accelerator, reward: str, pairs) -> torch.Tensor:
    """Return the rewards (n, 2) of the chosen and the rejected response of validation pairs."""
    tokenizer = ppo.load_tokenizer(reward)
    reward_model = ppo.load_reward_model(reward, tokenizer).to(accelerator.device)
    pairs, scores = pairs.with_format("torch"), []
    for side in ("chosen", "rejected"):
        batch = ppo.make_batch(pairs["query_token"][:], pairs[f"{side}_token"][:], tokenizer.pad_token_id)
        scores.append(ppo.reward_scores(accelerator, reward_model, batch, ppo.Args(micro_batch_size=32)))
    return torch.stack(scores, 1)


@torch.no_grad()
def accuracy_rows(arm: Path, trained: int, sampled: int) -> list[dict]:
    """Return a row for each reward model (of the arm's rounds 1 to `trained`), validation pairs (of the rounds 1 to
    `sampled`; once's are the graded arm's) and grade: the number of pairs, how many the reward model decides right (a
    tie is half), and the mean chance that its rewards give to the response that they prefer."""
    accelerator, rows = Accelerator(cpu=True), []
    place = {"arm": arm.name, "size": arm.parts[-3], "seed": int(arm.parts[-2])}
    answers = arm.with_name("graded") if arm.name == "once" else arm
    for i in range(1, trained + 1):
        for j in range(1, sampled + 1):
            pairs = load_from_disk(answers / str(j) / "labelled/noise_0")["validation"]
            scores = pair_scores(accelerator, str(arm / str(i) / "reward/model"), pairs)
            table = pandas.DataFrame({"grade": pairs["grade"][:], "hits": wins(*scores.T).tolist()})
            table["chance"] = (scores[:, 0] - scores[:, 1]).abs().sigmoid().tolist()
            found = table.groupby("grade").agg(pairs=("hits", "size"), hits=("hits", "sum"), chance=("chance", "mean"))
            place |= {"reward_model": i, "pairs_of": j}
            rows += [place | {"grade": grade} | numbers for grade, numbers in found.to_dict("index").items()]
    return rows


def measure(run: Path, output: Path = RESULTS):
    """Add the policy of RUNS/SIZE/SEED/ARM/ROUND to rounds.csv and, if it is not there, the SFT policy, as round 0."""
    size, seed, arm, number = run.parts[-4:]
    file, sft, place = output / "rounds.csv", run.parents[1] / "sft", {"size": size, "seed": int(seed)}
    pairs = load_from_disk(run / "pairs/preference")["train"]
    reward = next(path for path in (run / "reward", run / "reward_1") if path.exists())
    policies = {(arm, int(number), len(pairs)): run / "ppo", ("sft", 0, 0): sft}
    table = pandas.read_csv(file) if file.exists() else pandas.DataFrame(columns=["arm", *place])
    if ((table[["arm", *place]] == ["sft", *place.values()]).all(axis=1)).any():
        del policies["sft", 0, 0]
    rows = []
    for (name, i, labels), policy in policies.items():
        numbers, _, _ = metric.measure(metric.Args(str(policy), str(sft), str(reward)))
        rows.append({"arm": name} | place | {"round": i, "labels": labels} | numbers)
        if name in ("sft", "ensemble"):  # the ensemble's PPO saw the mean of five, and these are one member's
            rows[-1] |= {"score": None, "accuracy": None}
    append(rows, file)
    print(f"{arm}, size {size}, seed {seed}, round {number}: {len(pairs)} labels, truth {rows[0]['truth']:.3f}")


def accuracies(run: Path, trained: int, sampled: int, output: Path = RESULTS):
    """Add `accuracy_rows` of RUNS/SIZE/SEED/ARM to accuracy.csv."""
    append(accuracy_rows(run, trained, sampled), output / "accuracy.csv")


# ---- results -----------------------------------------------------------------------------------------------------


def pairs(labelled: Annotated[Path, tyro.conf.Positional], count: int = 3):
    """Print some training pairs of a round: post, responses, the truth of each, grade and label."""
    rows = load_from_disk(labelled / "noise_25")["train"]
    for row in rows.select(range(min(count, len(rows)))):
        print(f"{row['query']}\n")
        for side in ("chosen", "rejected"):
            print(f"{side} ({row[f'{side}_policy']}), truth {row[f'gold_{side}']:.3f}:{row[side]}")
        print(f"{row['grade']}, label {row['batch']}\n{'-' * 120}")


def print_contrasts(contrasts: dict[str, pandas.Series]):
    """Print differences (a value a seed) with their 95 % intervals, p corrected for all of them."""
    for name, row in summarise(pandas.DataFrame(contrasts), [], 0).items():
        print(f"{name}, 95 %: {PAIRED.format(**row)}")


def show_truth(table: pandas.DataFrame, size: str):
    """Print the policies of one size and their differences in truth."""
    rows, lines = table[table["size"] == size], []
    for (arm, number), own in rows.groupby(["arm", "round"], sort=False):
        cells = {
            "arm": ARMS[arm],
            "round": str(number),
            "seeds": str(len(own)),
            "labels": f"{own['labels'].mean():.0f}",
        }
        lines.append(cells | {name: with_sd(own[name].dropna(), digits) for name, digits in NUMBERS.items()})
    print(f"\nSize {size}; mean ± standard deviation over seeds:\n\n{markdown(lines)}")
    truth = rows.set_index(["arm", "round", "seed"])["truth"].unstack("seed")
    last = {arm: truth.loc[arm].iloc[-1] for arm in ARMS if arm in truth.index.get_level_values("arm")}
    if {"graded", "sft"} <= set(last):
        contrasts = {"truth of round 1 less SFT's": truth.loc[("graded", 1)] - last["sft"]}
        contrasts["truth of the last round less SFT's"] = last["graded"] - last["sft"]
        for arm in [arm for arm in last if arm not in ("graded", "sft")]:
            contrasts[f"truth, {ARMS[arm]}, less the last round's"] = last[arm] - last["graded"]
        print_contrasts(contrasts)


def show_accuracy(table: pandas.DataFrame, size: str):
    """Print how the reward models of one size decide the pairs of all rounds."""
    shares = {}
    for arm, rows in table[table["size"] == size].groupby("arm", sort=False):
        sums = rows.groupby(["reward_model", "pairs_of", "seed"])[["hits", "pairs"]].sum()
        shares[arm] = (sums["hits"] / sums["pairs"]).unstack("seed")
        trained, sampled = (sorted(set(level)) for level in zip(*shares[arm].index, strict=True))
        lines = [
            {"reward model of": f"round {i}"}
            | {f"pairs of round {j}": with_sd(shares[arm].loc[i, j].dropna(), 3) for j in sampled}
            for i in trained
        ]
        print(f"\nAccuracy on validation pairs, size {size}, {ARMS[arm]}, {rows['seed'].nunique()} seeds:\n")
        print(markdown(lines))
        own = rows[rows["reward_model"] == rows["pairs_of"]]
        lines = []
        for grade in (grade for grade in GRADES if grade in set(own["grade"])):
            part = own[own["grade"] == grade]
            stated = (part["chance"] * part["pairs"]).sum() / part["pairs"].sum()
            lines.append(
                {"grade": grade, "pairs": f"{part['pairs'].sum()}", "stated chance to be right": f"{stated:.3f}"}
            )
            lines[-1]["accuracy"] = f"{part['hits'].sum() / part['pairs'].sum():.3f}"
        print("Each reward model on the pairs of its own round, by grade:\n\n" + markdown(lines))
    for arm in [arm for arm in shares if arm != "once"]:
        own, last = shares[arm], max(shares[arm].index)[0]
        if last > 1:
            contrasts = {f"round 1's model, pairs of round {last} less round 1": own.loc[1, last] - own.loc[1, 1]}
            name = f"on the pairs of round {last}, round {last}'s model less "
            contrasts[f"{name}round 1's"] = own.loc[last, last] - own.loc[1, last]
            if "once" in shares and arm == "graded":
                contrasts[f"{name}once's"] = own.loc[last, last] - shares["once"].loc[1, last]
            print(f"\n{ARMS[arm]}:")
            print_contrasts(contrasts)


def show(output: Path = RESULTS):
    """Print the tables of rounds.csv and accuracy.csv, and draw truth over labels."""
    with or_fail("no rows yet"):
        table = pandas.read_csv(output / "rounds.csv")
    table = table.sort_values(
        ["arm", "round"], key=lambda x: x.map([*ARMS].index) if x.name == "arm" else x, kind="stable"
    )
    accuracy = pandas.read_csv(output / "accuracy.csv") if (output / "accuracy.csv").exists() else None
    for size in table["size"].unique():
        show_truth(table, size)
        if accuracy is not None:
            show_accuracy(accuracy, size)
    draw(table, output / "rounds.png")


def draw(table: pandas.DataFrame, file: Path):
    """Draw truth over labels: a line an arm with its seeds as points, a panel a size."""
    sizes = list(table["size"].unique())
    figure = Figure(figsize=(6.5 * len(sizes), 4.5), layout="constrained")
    for axis, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        for i, (arm, name) in enumerate(ARMS.items()):
            own = table[(table["size"] == size) & (table["arm"] == arm)]
            if arm == "sft":
                axis.axhline(own["truth"].mean(), color=f"C{i}", linestyle=":", label=name)
            elif len(own):
                own = own.assign(labels=own["labels"] + 16 * i - 32)  # side by side where arms have as many
                means = own.groupby("round")[["labels", "truth"]].mean()
                axis.plot(means["labels"], means["truth"], "o-", color=f"C{i}", label=name)
                axis.plot(own["labels"], own["truth"], ".", color=f"C{i}", alpha=0.4)
        axis.set(xlabel="labels", ylabel="truth", title=f"size {size}")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=9, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    figure.savefig(file, dpi=90)
    print(f"\nfigure: {file}")


if __name__ == "__main__":
    commands = {"merge": merge, "measure": measure, "accuracies": accuracies, "one-commit": one_commit}
    commands |= {"pairs": pairs, "show": show}
    if len(sys.argv) < 2:
        fail(f"name a command: {', '.join(commands)} (--help tells more)")
    tyro.extras.subcommand_cli_from_dict(commands)
