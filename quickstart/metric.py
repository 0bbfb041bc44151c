"""What a policy of the quick start is worth, measured on posts that no script has seen. score.py runs this in a process
of its own, after the policy's training has ended.

    python quickstart/metric.py --policy RUN --sft RUN --reward RUN

prints one line of JSON: truth, win_rate, wrong_facts, words, rougeL and eos_rate at temperature 0.01, the reward
model's score of the same summaries, the KL to the SFT policy at temperature 0.7, and the accuracy of the reward model
on pairs with clean labels. The posts are made here, by posts.py with a seed of its own, and removed afterwards.
"""

import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import posts
import torch
import tyro
from accelerate import Accelerator
from rouge_score.rouge_scorer import RougeScorer
from truth import find_facts, judge, score

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "eval")]

from eval_helpers import at_least, log_ratios, wins  # noqa: E402

import ppo  # noqa: E402
from tldr_dataset import query_columns  # noqa: E402

SEED = 20_261_127  # of the posts that are only generated here
TEMPERATURE, KL_TEMPERATURE = 0.01, 0.7
KINDS = ("posts", "yardsticks", "comparisons")  # folders of posts.py


@dataclass
class Args:
    policy: str
    """run folder of the policy to measure"""
    sft: str
    """run folder of the SFT policy: reference of the KL"""
    reward: str
    """run folder of the reward model"""
    posts: int = 500
    """number of posts"""
    response_length: int = 53
    """maximum number of tokens of a summary"""


def fresh_posts(count: int) -> tuple[list[dict], list[dict]]:
    """Return new posts (id, title, post, summary, and what a nearly perfect and a lazy policy would write), and pairs
    of summaries of as many others with clean labels."""
    sizes = {"num_train": 1, "num_validation": count, "num_test": 1, "num_comparisons": 1}
    sizes |= {"num_validation_comparisons": count, "num_cnndm_comparisons": 0}
    with tempfile.TemporaryDirectory() as folder:
        posts.main(posts.Args(f"{folder}/raw", **sizes, label_noise=0.0, vocab_size=300, seed=SEED))
        texts = [Path(folder, "raw", kind, "validation.jsonl").read_text() for kind in KINDS]
    rows, yardsticks, pairs = ([json.loads(line) for line in text.splitlines()] for text in texts)
    return [row | more for row, more in zip(rows, yardsticks, strict=True)], pairs


def text_numbers(rows: list[dict], summaries: list[str]) -> dict[str, float]:
    """Return truth, win rate against the reference, wrong facts, words and ROUGE-L of a summary of each post."""
    rouge = RougeScorer(["rougeL"])
    both = list(zip(rows, summaries, strict=True))
    return {
        "truth": fmean(score(row["post"], summary) for row, summary in both),
        "win_rate": fmean(judge(row["post"], summary, row["summary"]) for row, summary in both),
        "wrong_facts": fmean(wrong_facts(row["post"], summary) for row, summary in both),
        "words": fmean(len(re.findall(r"\w+", summary)) for summary in summaries),
        "rougeL": fmean(rouge.score(row["summary"], summary)["rougeL"].fmeasure for row, summary in both),
    }


@torch.no_grad()
def measure(args: Args) -> tuple[dict[str, float], list[dict], list[str]]:
    """Return the numbers of the docstring above, the posts, and the policy's summary of each."""
    at_least(1, args, "posts", "response_length")
    accelerator = Accelerator(cpu=True)
    folders = {name: ppo.local_checkpoint(f"--{name}", getattr(args, name)) for name in ("policy", "sft", "reward")}
    tokenizer = ppo.load_tokenizer(folders["sft"])
    policy, sft = (ppo.load_policy(folders[name], tokenizer) for name in ("policy", "sft"))
    reward_model = ppo.load_reward_model(folders["reward"], tokenizer)
    rows, pairs = fresh_posts(args.posts)

    settings = ppo.Args(response_length=args.response_length, sample_batch_size=64, micro_batch_size=32)
    columns = [query_columns(row, tokenizer, 512) for row in rows]
    queries = torch.tensor([row["query_token"] for row in columns])
    keys = ppo.noise_keys(SEED, 0, range(len(rows)), args.response_length)
    batches = {}
    for temperature in (TEMPERATURE, KL_TEMPERATURE):
        responses, _ = ppo.sample(accelerator, policy, queries, keys, tokenizer, settings, temperature)
        batches[temperature] = ppo.make_batch(queries, responses, tokenizer.pad_token_id)
    batch = batches[TEMPERATURE]
    summaries = tokenizer.batch_decode(batch["responses"], skip_special_tokens=True)
    numbers = text_numbers(rows, summaries)
    numbers["eos_rate"] = (batch["responses"] == tokenizer.eos_token_id).any(1).float().mean().item()
    numbers["score"] = ppo.reward_scores(accelerator, reward_model, batch, settings).mean().item()
    numbers["kl"] = log_ratios(policy, sft, batches[KL_TEMPERATURE], KL_TEMPERATURE).mean().item()
    numbers["accuracy"] = accuracy(accelerator, reward_model, pairs, tokenizer, settings)
    return numbers, rows, summaries


def wrong_facts(post: str, summary: str) -> int:
    """Return the number of facts that a summary states and its post does not."""
    truth, said = find_facts(post), find_facts(summary)
    return sum(len(said[kind] - truth[kind]) for kind in said)


def accuracy(accelerator, reward_model, pairs: list[dict], tokenizer, settings) -> float:
    """Return in which share of the pairs the reward model prefers the better summary; a tie counts half."""
    queries = [query_columns(pair["info"], tokenizer, 512)["query_token"] for pair in pairs]
    scores = []
    for side in (0, 1):
        texts = [pair["summaries"][side]["text"] + tokenizer.eos_token for pair in pairs]
        responses = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").input_ids
        batch = ppo.make_batch(torch.tensor(queries), responses, tokenizer.pad_token_id)
        scores.append(ppo.reward_scores(accelerator, reward_model, batch, settings))
    choices = torch.tensor([pair["choice"] for pair in pairs]).bool()
    return torch.where(choices, wins(scores[1], scores[0]), wins(scores[0], scores[1])).mean().item()


if __name__ == "__main__":
    print(json.dumps(measure(tyro.cli(Args))[0]))
