"""Compare policies of the quick start, scored by the exact truth of ../quickstart/truth.py.

    python variants/compare.py --raw data/quickstart/posts-1/raw --sft runs/quickstart/posts-1/sft/nano-s/1 \
        --runs runs/quickstart/posts-1/{ppo,rloo,grpo}/nano-s/1

Each run folder needs eval/samples_validation.csv from ../eval/samples.py (temperature 0.01). From these samples come
the truth, the win rate against the reference summary, the numbers of words and of wrong facts per summary, and the
difference to the SFT policy's truth, paired by post, with a 95 % bootstrap interval over the posts. The KL to the SFT
model is measured on one more sample per post at the training temperature 0.7: the sum of log pi - log pi_sft over a
response's tokens, as mean and standard error over posts. Seconds are the training time that the run logged, plus DPO's
reference pass over all pairs.
"""

import csv
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
import tyro
from accelerate import Accelerator
from rich.console import Console
from rich.progress import track
from transformers.utils import logging as transformers_logging

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT), str(ROOT / "eval"), str(ROOT / "quickstart")]

from report import bootstrap_interval, fail, read_rows  # noqa: E402
from run_metrics import read_metrics  # noqa: E402
from truth import find_facts, judge, score  # noqa: E402

import ppo  # noqa: E402


@dataclass
class Args:
    raw: Path
    """folder of the raw posts that quickstart/posts.py made"""
    sft: Path
    """run folder of the SFT policy"""
    runs: list[Path]
    """run folders of the policies to compare"""
    output: Path | None = None
    """CSV file to write the unrounded numbers to"""


def kl_to_sft(accelerator, policy, sft, tokenizer, queries: torch.Tensor) -> torch.Tensor:
    """Return log pi - log pi_sft (n,), summed over the tokens of a response that the policy samples to each query (n,
    Q)."""
    args = ppo.Args(sample_batch_size=32, response_length=53)
    keys = ppo.noise_keys(1, -2, range(len(queries)), args.response_length)  # training never has an update -2
    responses, _ = ppo.sample(accelerator, policy, queries, keys, tokenizer, args, args.temperature)
    batch = ppo.make_batch(queries, responses, tokenizer.pad_token_id)
    kl = torch.zeros(len(queries))
    with torch.no_grad():
        for mb in ppo.micro_batches(batch, torch.arange(len(queries)), 32):
            logits, sft_logits = (ppo.response_logits(model, mb["tokens"], mb["columns"]) for model in (policy, sft))
            logprobs = ppo.token_logprobs(logits, mb["responses"], args.temperature)
            sft_logprobs = ppo.token_logprobs(sft_logits, mb["responses"], args.temperature)
            kl[mb["rows"]] = ((logprobs - sft_logprobs) * mb["response_mask"]).sum(1)
    return kl


def wrong_facts(post: str, summary: str) -> int:
    """Return the number of facts that a summary states and its post does not."""
    truth, said = find_facts(post), find_facts(summary)
    return sum(len(said[kind] - truth[kind]) for kind in said)


def compare(args: Args) -> list[dict]:
    """Return one row of numbers for the SFT policy and one for each run."""
    transformers_logging.disable_progress_bar()
    accelerator = Accelerator(cpu=True)
    posts = {row["id"]: row for row in read_rows(args.raw / "posts" / "validation.jsonl", ["id", "post", "summary"])}
    folder = ppo.local_checkpoint("--sft", str(args.sft))
    tokenizer = ppo.load_tokenizer(folder)
    sft = ppo.load_policy(folder, tokenizer)
    table, sft_truths = [], []
    for run in track([args.sft, *args.runs], description="comparing", console=Console(stderr=True)):
        path = run / "eval" / "samples_validation.csv"
        if not path.exists():
            fail(f"{path} does not exist. Make it with: python eval/samples.py {run} --splits validation")
        samples = read_rows(path, ["id", "query", "response"])
        told = [(posts[row["id"]]["post"], row["response"], posts[row["id"]]["summary"]) for row in samples]
        truths = [score(post, summary) for post, summary, _ in told]
        sft_truths = sft_truths or truths
        differences = [truth - before for truth, before in zip(truths, sft_truths, strict=True)]
        low, high = bootstrap_interval(differences, 2_000)
        queries = tokenizer([row["query"] for row in samples], padding=True, padding_side="left", return_tensors="pt")
        policy = ppo.load_policy(ppo.local_checkpoint("--runs", str(run)), tokenizer)
        kl = kl_to_sft(accelerator, policy, sft, tokenizer, queries.input_ids)
        metrics = read_metrics(run)
        row = {"policy": json.loads((run / "args.json").read_text())["stage"], "truth": fmean(truths)}
        row |= {"above_sft": fmean(differences), "low": low, "high": high}
        row["win_rate"] = fmean(judge(*one) for one in told)
        row["wrong_facts"] = fmean(wrong_facts(post, summary) for post, summary, _ in told)
        row["words"] = fmean(len(re.findall(r"\w+", summary)) for _, summary, _ in told)
        row |= {"kl": kl.mean().item(), "kl_error": (kl.std() / len(kl) ** 0.5).item()}
        seconds = metrics[0].get("time/reference", 0.0) + metrics[-1]["time/total"]  # only DPO logs time/reference
        row |= {"episodes": metrics[-1]["episode"], "seconds": seconds}
        table.append(row)
    return table


def main(args: Args):
    table = compare(args)
    print("| | truth | above SFT, 95 % | win rate | wrong facts | words | KL to SFT | responses or pairs | seconds |")
    print("|" + "---|" * 9)
    for row in table:
        above = f"{row['above_sft']:.3f} ({row['low']:.3f} to {row['high']:.3f})" if row is not table[0] else ""
        kl = f"{row['kl']:.2f} ± {row['kl_error']:.2f}" if row is not table[0] else ""
        numbers = [f"{row[key]:.{digits}f}" for key, digits in (("win_rate", 3), ("wrong_facts", 2), ("words", 1))]
        cells = [row["policy"], f"{row['truth']:.3f}", above, *numbers, kl]
        print("|", " | ".join([*cells, f"{row['episodes']:,}", f"{row['seconds']:.0f}"]), "|")
    if args.output:
        with args.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, table[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    main(tyro.cli(Args))
