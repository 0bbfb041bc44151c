"""The gold reward of PPO runs, which never enters their training.

    python eval/gold.py runs/ensembles/ppo --gold runs/reward/6.9b/44413          # a reward model, folder or Hub id
    python eval/gold.py runs/ensembles/ppo --gold quickstart/truth.py:score       # a function of (post, summary)

Scores the validation samples that ensembles/ppo.py writes to samples/, for each run in or below the folders, and
writes into the run's folder:

gold_samples.csv    the samples of all updates, with their gold reward
gold.csv            a row for each update: means of its samples' gold reward, score (the combined score of the reward
                    models, standardised if they are, without the penalty for a missing EOS), kl_k2 (nats) and tokens;
                    gold_se, the standard error over posts; sqrt_kl, the square root of the mean KL; second_gold; and
                    judge, the --gold that made it

All updates have the same posts and the same noise, so compare two updates by their differences post by post. A reward
model reads the sampled tokens or, if a run has none of its tokenizer, its own tokens of the response's text, with EOS
where it ended. A function gets the texts of query and response.
"""

import csv
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import pandas
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval_helpers import fail, files_below, or_fail  # noqa: E402
from judge import scores_of  # noqa: E402


@dataclass
class Args:
    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """run folders of ensembles/ppo.py, or folders with such runs at any depth"""
    gold: str
    """gold reward: a reward model (run folder, checkpoint folder or Hub id[@revision]) or path.py:function"""
    second_gold: str | None = None
    """another gold reward, likewise, with a column of its own: where the first is a model, it may be overoptimised"""


def read_samples(folders: tuple[str, ...]) -> pandas.DataFrame:
    """Return the samples of all runs in or below the folders, with the columns run and update."""
    files = {file.resolve() for folder in folders for file in files_below(folder, "**/samples/update_*.csv")}
    frames = []
    for file in sorted(files):
        with or_fail(f"{file} cannot be read"):
            text = dict.fromkeys(["id", "query", "response"], str)
            frame = pandas.read_csv(file, keep_default_na=False, dtype=text)
        update = int(file.stem.removeprefix("update_"))
        frames.append(frame.assign(run=str(file.parents[1]), update=update))
    if not frames:
        fail(f"{' '.join(folders)}: no samples/update_*.csv there, which ensembles/ppo.py --eval-every writes")
    return pandas.concat(frames, ignore_index=True)


def tokens_of(tokenizer, samples: pandas.DataFrame) -> list[tuple[int, ...]]:
    """Return the tokens that a reward model reads of each sample: those that were sampled or, if a run has none or they
    are another tokenizer's, its own of that run's texts."""
    samples = samples.assign(ids=samples.get("response_token", pandas.Series("[]", samples.index)).fillna("[]"))
    responses = []
    for run, rows in samples.groupby("run", sort=False):  # a run's rows stand together
        texts, sampled = rows["response"].tolist(), rows["ids"].map(json.loads).tolist()
        if tokenizer.batch_decode(sampled, skip_special_tokens=True) != texts:
            print(f"{run}: no sampled tokens of the tokenizer in {tokenizer.name_or_path}, so it reads the texts")
            encoded = tokenizer(texts, add_special_tokens=False).input_ids
            sampled = [x + [tokenizer.eos_token_id] * end for x, end in zip(encoded, rows["has_eos"], strict=True)]
        responses += sampled
    queries = tokenizer(samples["query"].tolist(), add_special_tokens=False).input_ids
    return [(*query, *response) for query, response in zip(queries, responses, strict=True)]


def main(args: Args):
    samples = read_samples(args.runs)
    names = [f"{x.run}, update {x.update}, post {x.id}" for x in samples.itertuples()]
    for column, value in {"gold": args.gold, "second_gold": args.second_gold}.items():
        if value:
            texts, flag = zip(samples["query"], samples["response"], strict=True), f"--{column.replace('_', '-')}"
            samples[column] = scores_of(flag, value, texts, names, partial(tokens_of, samples=samples))
    for run, rows in samples.groupby("run"):
        updates = rows.groupby("update")
        table = updates[[x for x in ("gold", "score", "kl_k2", "tokens", "second_gold") if x in samples]].mean()
        table.insert(1, "gold_se", updates["gold"].sem())
        table["sqrt_kl"] = table["kl_k2"] ** 0.5
        table["judge"] = args.gold
        with or_fail(f"{run} could not be written"):
            rows.drop(columns="run").dropna(axis=1, how="all").to_csv(
                f"{run}/gold_samples.csv", index=False, quoting=csv.QUOTE_NONNUMERIC
            )
            table.to_csv(f"{run}/gold.csv")
        print(f"{run}\n{table.to_string(float_format='%.4g')}\n")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
