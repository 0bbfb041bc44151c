"""Steps and results of llama2/rounds.sh, Llama 2's loop: pairs of the newest policies, a reward model, a policy, again.

    python llama2/rounds.py show                                                   # tables and figure of the results
    python llama2/rounds.py pairs runs/llama2_rounds/s/1/graded/3/labelled         # three pairs with their truth

The other two commands are steps of rounds.sh. `merge` joins the pairs of all rounds so far: labels of training pairs
are noisy, those of validation pairs are the truth's, and their `batch` is the round. `measure` adds a policy's row to
rounds.csv and, after the last round, the accuracy of each round's reward model on each round's validation pairs to
accuracy.csv.
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
import torch  # noqa: E402
import tyro  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from datasets import DatasetDict, concatenate_datasets, load_from_disk  # noqa: E402
from eval_helpers import fail, markdown, wins, with_sd  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from paired import summarise  # noqa: E402
from score import commit_of, machine  # noqa: E402

import ppo  # noqa: E402
from tldr_dataset import unfinished_folder  # noqa: E402

RESULTS = ROOT / "llama2/results"
ARMS = {
    "graded": "rounds, margins by grade",
    "plain": "rounds, no margins",
    "once": "all pairs from the SFT policy",
    "ensemble": "the same, five reward models",
}
PAIRED = "{mean:+.3f} ({low:+.3f} to {high:+.3f}), p {holm:.3f}, would have shown {power:.3f}"
GRADES = ["significantly", "better", "slightly", "negligibly"]
NUMBERS = {"truth": 3, "win_rate": 3, "wrong_facts": 2, "words": 1, "kl": 2, "score": 2, "accuracy": 3}


def merge(labelled: list[Path], to: Path, count: int):
    """Join the pairs of several rounds, each a folder of gold_label.py with noise_0 and noise_25. count: of each
    round's training pairs, keep so many, the first, so that all arms have as many. Ends with an error if one has
    fewer."""
    splits = {"train": [], "validation": []}
    for number, folder in enumerate(labelled, 1):
        noisy = load_from_disk(folder / "noise_25")["train"]
        if len(noisy) < count:
            fail(f"{folder} has {len(noisy)} training pairs, fewer than --count {count}: label more prompts")
        splits["train"].append(noisy.take(count))
        clean = load_from_disk(folder / "noise_0")["validation"]
        splits["validation"].append(clean.remove_columns("batch").add_column("batch", [f"round {number}"] * len(clean)))
    with unfinished_folder(to) as folder:
        joined = DatasetDict({split: concatenate_datasets(parts) for split, parts in splits.items()})
        joined.save_to_disk(folder / "finished" / "preference")
    print(f"{to}: {len(joined['train'])} pairs of {len(labelled)} rounds")


# ---- measuring ---------------------------------------------------------------------------------------------------


def append(rows: list[dict], file: Path):
    """Add rows to a CSV file, with commit and date."""
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pandas.DataFrame(rows).assign(commit=commit_of(), date=time.strftime("%Y-%m-%d"), cpu=machine()["cpu"])
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
    tie is half), and the mean chance that its rewards give to the better response."""
    accelerator, rows = Accelerator(cpu=True), []
    place = {"arm": arm.name, "size": arm.parts[-3], "seed": int(arm.parts[-2])}
    answers = arm.with_name("graded") if arm.name == "once" else arm
    for i in range(1, trained + 1):
        for j in range(1, sampled + 1):
            pairs = load_from_disk(answers / str(j) / "labelled/noise_0")["validation"]
            scores = pair_scores(accelerator, str(arm / str(i) / "reward/model"), pairs)
            table = pandas.DataFrame({"grade": pairs["grade"][:], "hits": wins(*scores.T).tolist()})
            table["chance"] = (scores[:, 0] - scores[:, 1]).sigmoid().tolist()
            found = table.groupby("grade").agg(pairs=("hits", "size"), hits=("hits", "sum"), chance=("chance", "mean"))
            place |= {"reward_model": i, "pairs_of": j}
            rows += [place | {"grade": grade} | numbers for grade, numbers in found.to_dict("index").items()]
    return rows


def measure(run: Path, rounds: int = 5, output: Path = RESULTS):
    """Add the policy of RUNS/SIZE/SEED/ARM/ROUND to rounds.csv. Ends with an error if rows of this arm and seed are of
    another commit."""
    size, seed, arm, number = run.parts[-4:]
    file, place = output / "rounds.csv", {"arm": arm, "size": size, "seed": int(seed)}
    for old in pandas.read_csv(file).to_dict("records") if file.exists() else []:
        if old | place == old and old["commit"] != commit_of():
            fail(
                f"{file} has rows of {arm}, size {size}, seed {seed} of commit {old['commit']}: remove them or go back"
            )
    pairs = load_from_disk(run / "pairs/preference")["train"]
    reward = next(path for path in (run / "reward", run / "reward_1") if path.exists())
    numbers, _, _ = metric.measure(metric.Args(str(run / "ppo"), str(run.parents[1] / "sft"), str(reward)))
    row = place | {"round": int(number), "labels": len(pairs)} | numbers
    if arm == "ensemble":  # PPO saw the mean of five, and these are one member's
        row |= {"score": None, "accuracy": None}
    append([row], file)
    if int(number) == (1 if arm == "once" else rounds):
        append(accuracy_rows(run.parent, int(number), rounds), output / "accuracy.csv")
    print(f"{arm}, size {size}, seed {seed}, round {number}: {len(pairs)} labels, truth {row['truth']:.3f}")


# ---- results -----------------------------------------------------------------------------------------------------


def pairs(labelled: Annotated[Path, tyro.conf.Positional], count: int = 3):
    """Print some training pairs of a round: post, responses, the truth of each, grade and label."""
    rows = load_from_disk(labelled / "noise_25")["train"]
    for row in rows.select(range(min(count, len(rows)))):
        print(f"{row['query']}\n")
        for side in ("chosen", "rejected"):
            print(f"{side} ({row[f'{side}_policy']}), truth {row[f'gold_{side}']:.3f}:{row[side]}")
        print(f"{row['grade']}, label {row['batch']}\n{'-' * 120}")


def show(output: Path = RESULTS):
    """Print the tables of rounds.csv and accuracy.csv, and draw truth over labels."""
    table = pandas.read_csv(output / "rounds.csv")
    accuracies = pandas.read_csv(output / "accuracy.csv") if (output / "accuracy.csv").exists() else pandas.DataFrame()
    for size, rows in table.groupby("size", sort=False):
        lines = []
        for (arm, number), own in rows.groupby(["arm", "round"], sort=False):
            cells = {"arm": ARMS[arm], "round": str(number), "seeds": str(len(own))}
            cells["labels"] = f"{own['labels'].mean():.0f}"
            lines.append(cells | {name: with_sd(own[name].dropna(), digits) for name, digits in NUMBERS.items()})
        print(f"\nSize {size}; mean ± standard deviation over seeds:\n\n{markdown(lines)}")
        last = rows[rows["round"] == rows.groupby("arm")["round"].transform("max")]
        truth = last.pivot(index="seed", columns="arm", values="truth")
        others = [arm for arm in ARMS if arm in truth and arm != "graded"]
        if "graded" in truth and others:
            for arm, row in summarise(truth[others].sub(truth["graded"], axis=0), [], 3).items():  # three in all sizes
                print(f"{ARMS[arm]}, truth less the rounds' last, 95 %: {PAIRED.format(**row)}")
    for (size, arm), rows in accuracies.groupby(["size", "arm"], sort=False) if len(accuracies) else []:
        sums = rows.groupby(["seed", "reward_model", "pairs_of"])[["hits", "pairs"]].sum()
        cells = (sums["hits"] / sums["pairs"]).groupby(["reward_model", "pairs_of"]).agg(list)
        trained, sampled = (sorted(set(level)) for level in zip(*cells.index, strict=True))
        lines = [
            {"reward model of": f"round {i}"} | {f"pairs of round {j}": with_sd(cells[i, j], 3) for j in sampled}
            for i in trained
        ]
        print(f"\nAccuracy on validation pairs, size {size}, {ARMS[arm]}, {rows['seed'].nunique()} seeds:\n")
        print(markdown(lines))
        by_seed, first, last = (sums["hits"] / sums["pairs"]).unstack("seed"), trained[0], sampled[-1]
        contrasts = {f"round {first}'s model, pairs of round {last} less round {first}": by_seed.loc[first, last]}
        contrasts[next(iter(contrasts))] -= by_seed.loc[first, first]
        if trained[-1] != first:
            later = by_seed.loc[trained[-1], last] - by_seed.loc[first, last]
            contrasts[f"on the pairs of round {last}, round {trained[-1]}'s model less round {first}'s"] = later
        for name, row in summarise(pandas.DataFrame(contrasts), [], 0).items():
            print(f"{name}, 95 %: {PAIRED.format(**row)}")
        own = rows[rows["reward_model"] == rows["pairs_of"]]
        lines = []
        for grade in (grade for grade in GRADES if grade in set(own["grade"])):
            part = own[own["grade"] == grade]
            stated = (part["chance"] * part["pairs"]).sum() / part["pairs"].sum()
            right = part["hits"].sum() / part["pairs"].sum()
            lines.append({"grade": grade, "pairs": f"{part['pairs'].sum()}"})
            lines[-1] |= {"chance that the rewards give": f"{stated:.3f}", "accuracy": f"{right:.3f}"}
        print("\nEach reward model on the pairs of its own round, by grade:\n\n" + markdown(lines))
    draw(table, output / "rounds.png")


def draw(table: pandas.DataFrame, file: Path):
    """Draw truth over labels: a line an arm with its seeds as points, a panel a size."""
    sizes = list(table["size"].unique())
    figure = Figure(figsize=(6.5 * len(sizes), 4.5), layout="constrained")
    for axis, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        for i, (arm, name) in enumerate(ARMS.items()):
            own = table[(table["size"] == size) & (table["arm"] == arm)]
            if len(own):
                means = own.groupby("round")[["labels", "truth"]].mean()
                axis.plot(means["labels"], means["truth"], "o-", color=f"C{i}", label=name)
                axis.plot(own["labels"], own["truth"], ".", color=f"C{i}", alpha=0.4)
        axis.set(xlabel="labels", ylabel="truth", title=f"size {size}")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=9)
    figure.savefig(file, dpi=90)
    print(f"\nfigure: {file}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        fail("name a command: merge, measure, pairs or show (--help tells more)")
    tyro.extras.subcommand_cli_from_dict({"merge": merge, "measure": measure, "pairs": pairs, "show": show})
