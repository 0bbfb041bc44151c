"""Generate small raw data in the schemas of TL;DR: posts, comparisons, and a tokenizer trained on them.

Every post states four to six facts (who, what happened, to which object; some of an age, a feeling, a question) among
filler. The true score of any summary is known: `score(post, summary)` of `truth.py`.

    python quickstart/posts.py --output-dir data/quickstart/raw --seed 1

writes
    posts/{train,validation,test}.jsonl       id, subreddit, title, post, summary
    comparisons/{train,validation}.jsonl      info, summaries (two), choice, worker, batch, split, extra
    yardsticks/{validation,test}.jsonl        id, near_perfect, copied_title: the summaries of these policies
    tokenizer/                                byte-level BPE, <|endoftext|> is id 0
    pretraining.jsonl                         text: posts that restate their facts (with --num-pretraining)

The same seed writes the same bytes. The texts are made up; no person wrote or is described in them.
"""

import json
import random
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from truth import FACTS, score

sys.path.append(str(Path(__file__).resolve().parents[1] / "eval"))

from eval_helpers import at_least, fail  # noqa: E402


@dataclass
class Args:
    output_dir: str = "data/quickstart/raw"
    """folder to write; it must not exist yet"""
    num_train: int = 4000
    """posts in the train split"""
    num_validation: int = 500
    """posts in the validation split"""
    num_test: int = 500
    """posts in the test split"""
    num_comparisons: int = 16000
    """pairs of summaries in the train split, about train posts"""
    num_validation_comparisons: int = 1000
    """pairs in the validation split, about validation posts"""
    num_cnndm_comparisons: int = 500
    """further pairs in the validation split, about news articles (the schema of CNN/DM)"""
    num_pretraining: int = 0
    """documents to pretrain a base model on: other posts, with edits and replies that restate their facts"""
    label_noise: float = 0.25
    """share of the pairs whose choice is the worse summary (people agree with each other on about 3 pairs of 4)"""
    vocab_size: int = 1536
    """largest vocabulary of the tokenizer, bytes and <|endoftext|> included; a small corpus may give fewer tokens"""
    seed: int = 1
    """the same seed and sizes write the same bytes"""


# ---- the world ------------------------------------------------------------------------------------------------------

CORE_KINDS = ("person", "event", "object")  # in every post
EXTRA_KINDS = ("age", "feeling", "question")  # one to three of them in a post

# templates whose slots {kind} hold facts or other words, and these words ("slots"); "restatements" are edits and
# replies of the pretraining documents, by the kinds that they name
SENTENCES = json.loads((Path(__file__).parent / "sentences.json").read_text(encoding="utf-8"))

# policy -> weight in the comparisons: few invented facts, which only a model that checks every word sees, and many of
# the pairs near_perfect--reference, which teach it to count
POLICIES = {"terse": 3, "long": 3, "copied_title": 2, "invented": 1, "near_perfect": 6, "reference": 6}
MIN_GAP = 0.25  # of the two scores of a pair: where people can not tell, there is no right choice
CNNDM_BATCHES = ["cnndm0", "cnndm2", "batch0_cnndm"]


# ---- helpers --------------------------------------------------------------------------------------------------------


def draw_facts(rng: random.Random, extras: tuple[int, ...] = (1, 2, 2, 3, 3, 3)) -> dict[str, str]:
    """Return a value for each core kind and for some of the extra kinds, whose number is drawn from `extras`."""
    kinds = (*CORE_KINDS, *rng.sample(EXTRA_KINDS, rng.choice(extras)))
    return {kind: rng.choice(FACTS[kind]) for kind in FACTS if kind in kinds}


def fill(template: str, facts: dict[str, str], rng: random.Random) -> str:
    """Return a template with its facts filled in and a random word in every other slot."""
    text = re.sub(r"{(\w+)}", lambda slot: facts.get(slot[1]) or rng.choice(SENTENCES["slots"][slot[1]]), template)
    return text[0].upper() + text[1:]


def write_text(facts: dict, sentences: dict, filler: list[str], num_filler: int, rng: random.Random) -> str:
    """Return three paragraphs that state the facts in random order among sentences of filler."""
    parts = [rng.choice(sentences["core"])] + [rng.choice(sentences[kind]) for kind in EXTRA_KINDS if kind in facts]
    rng.shuffle(parts)
    lines = [fill(line, facts, rng) for part in parts for line in part]
    for template in rng.sample(filler, num_filler):
        lines.insert(rng.randint(0, len(lines)), fill(template, {}, rng))
    first, second = sorted(rng.sample(range(1, len(lines)), 2))
    return "\n".join(" ".join(part) for part in (lines[:first], lines[first:second], lines[second:]))


def write_document(rng: random.Random) -> str:
    """Return a pretraining document: a post as the stages see it, and edits and replies that restate its facts."""
    facts = draw_facts(rng, (1, 2, 2, 3))
    title = fill(rng.choice(SENTENCES["titles"]), facts, rng)
    text = f"SUBREDDIT: r/{rng.choice(SENTENCES['subreddits'])}\n\nTITLE: {title}\n\nPOST: "
    text += write_text(facts, SENTENCES["post_sentences"], SENTENCES["filler"], rng.randint(1, 8), rng)
    restatements = SENTENCES["restatements"]
    groups = [kinds for kinds in restatements if set(kinds.split()) <= set(facts)]
    for _ in range(rng.randint(5, 9)):
        text += "\n\n" + fill(rng.choice(restatements[rng.choice(groups)]), facts, rng)
    return text


def summarise(facts: dict[str, str], rng: random.Random) -> str:
    """Return a one-sentence summary of the given facts in one of several wordings."""
    parts = []
    if {"person", "event", "object"} & set(facts):
        who = f"my {facts['person']}" if "person" in facts else "someone"
        what = f"my {facts['object']}" if "object" in facts else "something"
        parts.append(f"{who} {facts['event']} {what}" if "event" in facts else f"{who} did this to {what}")
    if "age" in facts:
        parts.append(rng.choice([f"I'm {facts['age']}", f"at {facts['age']}"]))
    if "feeling" in facts:
        parts.append(rng.choice([f"still {facts['feeling']}", f"being {facts['feeling']}"]))
    if "question" in facts:
        parts.append(rng.choice([f"why not {facts['question']}?", f"so I will {facts['question']}"]))
    text = ", ".join(parts)
    text = text[:1].upper() + text[1:]
    return text if text.endswith("?") else text + "."


def reference_facts(facts: dict[str, str], rng: random.Random) -> dict[str, str]:
    """Return the facts that a reference summary states: each core fact with probability 0.9, and each other fact with
    probability 0.8 if its author is thorough (1 in 4) and otherwise 0.1. In 1 of 10 summaries, one is wrong."""
    stated, extra = {}, 0.8 if rng.random() < 0.25 else 0.1
    while not stated:
        stated = {kind: value for kind, value in facts.items() if rng.random() < (0.9 if kind in CORE_KINDS else extra)}
    if rng.random() < 0.1:
        kind = rng.choice(list(stated))
        stated[kind] = rng.choice([value for value in FACTS[kind] if value != facts[kind]])
    return stated


def summary_of(policy: str, row: dict, rng: random.Random) -> str:
    """Return a policy's summary of a row, which has facts, title and summary, without a leading space."""
    facts = row["facts"]
    if policy == "terse":  # one or two facts
        return summarise({kind: facts[kind] for kind in rng.sample(list(facts), rng.choice([1, 2]))}, rng)
    if policy == "long":  # every fact and then some, or what a reference tells, part of it again
        form = rng.choice(["filler", "filler", "twice", "stutter"])
        if form == "filler":
            text = summarise(facts, rng)
            return " ".join([text, *(fill(line, {}, rng) for line in rng.sample(SENTENCES["filler"], 6))])
        kept = reference_facts(facts, rng)
        text = summarise(kept, rng)
        if form == "stutter":
            return ", ".join([text[:-1], *[text[:-1].split(", ")[-1]] * rng.randint(2, 4)]) + text[-1]
        again = {kind: kept[kind] for kind in kept if kind in CORE_KINDS or rng.random() < 0.5}
        return rng.choice([f"{text} ", f"{text[:-1]}, "]) + summarise(again or kept, rng)
    if policy == "copied_title":
        return row["title"]
    if policy == "invented":  # what a reference tells, and two or three wrong facts: kinds the post lacks come first
        kept, lacking = reference_facts(facts, rng), [kind for kind in FACTS if kind not in facts]
        for kind in lacking + rng.sample(list(facts), rng.choice([2, 3]) - len(lacking)):
            kept[kind] = rng.choice([value for value in FACTS[kind] if value != facts.get(kind)])
        return summarise(kept, rng)
    if policy == "near_perfect":  # every fact, but for one in 1 of 10
        left_out = rng.choice(list(facts)) if rng.random() < 0.1 else None
        return summarise({kind: value for kind, value in facts.items() if kind != left_out}, rng)
    return row["summary"]


def compare(row: dict, split: str, args: Args, rng: random.Random) -> dict:
    """Return a comparison of two summaries of a row in the raw schema; `split` is train, valid1 or valid2."""
    text = row["article"] or row["post"]
    gap = 0.0
    while abs(gap) < MIN_GAP:
        policies = rng.sample(list(POLICIES), 2, counts=POLICIES.values())
        if policies[0] == policies[1]:
            continue
        summaries = [summary_of(policy, row, rng) for policy in policies]
        gap = round(score(text, summaries[1]) - score(text, summaries[0]), 6)
    choice = int(gap > 0)
    if rng.random() < args.label_noise:
        choice = 1 - choice
    # one scale from 1 (surely the first) to 9 (surely the second); 5 would be no choice. The side is the choice's and
    # the distance follows the gap
    level = min(4, 1 + int(abs(gap) / 0.3))
    confidence = 5 + level if choice == 1 else 5 - level
    if split == "train" and rng.random() < 0.5:
        confidence = None  # as in much of the real train split
    return {
        "info": {key: row[key] for key in ("id", "post", "title", "subreddit", "site", "article")},
        "summaries": [{"text": f" {s}", "policy": p, "note": None} for s, p in zip(summaries, policies, strict=True)],
        "choice": choice,
        "worker": f"worker{rng.randrange(10)}",
        "batch": rng.choice(CNNDM_BATCHES if row["article"] else ["batch6", "batch7", "batch8"]),
        "split": split,
        "extra": {"confidence": confidence},
    }


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with the settings of the GPT-NeoX one; <|endoftext|> is id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes: no text is unknown
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    special = {f"{name}_token": "<|endoftext|>" for name in ("bos", "eos", "unk")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=2048, **special)


def write_jsonl(path: Path, rows: list[dict]):
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(args: Args):
    # ---- arguments --------------------------------------------------------------------------------------------------
    at_least(1, args, "num_train", "num_validation", "num_test", "num_comparisons", "num_validation_comparisons")
    at_least(0, args, "num_cnndm_comparisons", "num_pretraining")
    if not 0 <= args.label_noise <= 1:
        fail(f"--label-noise is {args.label_noise}; it must be between 0 and 1")
    output_dir = Path(args.output_dir)
    if output_dir.exists():
        fail(f"{output_dir} exists; remove it (rm -r {output_dir}) or name another --output-dir")

    def progress(count: int, description: str):
        return track(range(count), description, console=Console(stderr=True), disable=not sys.stderr.isatty())

    # ---- posts ------------------------------------------------------------------------------------------------------
    posts, seen = {}, set()
    for split, count in (("train", args.num_train), ("validation", args.num_validation), ("test", args.num_test)):
        rng = random.Random(f"{args.seed} posts {split}")  # one stream a split: sizes do not change other splits
        posts[split] = []
        for i in progress(count, f"posts, {split}"):
            post = None
            while post is None or post in seen:  # no text is in two splits, or twice in one
                facts = draw_facts(rng)
                post = write_text(facts, SENTENCES["post_sentences"], SENTENCES["filler"], rng.randint(7, 9), rng)
            seen.add(post)
            row = {"id": f"{split}_{i:06d}", "subreddit": rng.choice(SENTENCES["subreddits"])}
            row |= {"title": fill(rng.choice(SENTENCES["titles"]), facts, rng), "post": post}
            row |= {"summary": summarise(reference_facts(facts, rng), rng)}
            posts[split].append(row | {"facts": facts, "site": None, "article": None})
    # ---- comparisons ------------------------------------------------------------------------------------------------
    comparisons = {}
    for split, count in (("train", args.num_comparisons), ("validation", args.num_validation_comparisons)):
        rng = random.Random(f"{args.seed} comparisons {split}")
        splits = ["train"] if split == "train" else ["valid1", "valid2"]
        draws = progress(count, f"comparisons, {split}")
        comparisons[split] = [compare(rng.choice(posts[split]), rng.choice(splits), args, rng) for _ in draws]
    rng = random.Random(f"{args.seed} comparisons cnndm")
    for i in range(args.num_cnndm_comparisons):
        facts = draw_facts(rng)
        row = {"id": f"cnndm_{i:06d}", "subreddit": None, "post": None, "site": "cnn", "facts": facts}
        sentences, filler = SENTENCES["article_sentences"], SENTENCES["article_filler"]
        row |= {"article": write_text(facts, sentences, filler, rng.randint(7, 9), rng)}
        row |= {"title": f"News about a {facts['object']}."}  # for copied_title alone
        row |= {"summary": summarise(reference_facts(facts, rng), rng)}
        comparison = compare(row, "valid2", args, rng)
        comparison["info"]["title"] = None
        comparisons["validation"].append(comparison)

    # ---- yardsticks: what a good and a lazy policy write about the posts that are evaluated -------------------------
    yardsticks = {}
    for split in ("validation", "test"):
        rng = random.Random(f"{args.seed} yardsticks {split}")
        yardsticks[split] = [
            {"id": row["id"]} | {name: summary_of(name, row, rng) for name in ("near_perfect", "copied_title")}
            for row in posts[split]
        ]

    # ---- pretraining: other posts, restated -------------------------------------------------------------------------
    rng = random.Random(f"{args.seed} pretraining")
    documents = [{"text": write_document(rng)} for _ in progress(args.num_pretraining, "pretraining documents")]

    # ---- tokenizer: trained on what a model will read ---------------------------------------------------------------
    texts = [
        f"SUBREDDIT: r/{r['subreddit']}\n\nTITLE: {r['title']}\n\nPOST: {r['post']}\n\nTL;DR:" for r in posts["train"]
    ]
    texts += [f" {row['summary']}" for row in posts["train"]]
    texts += [summary["text"] for row in comparisons["train"] for summary in row["summaries"]]
    tokenizer = train_tokenizer(texts, args.vocab_size)

    # ---- save: beside, then renamed, so that the folder is whole or absent ------------------------------------------
    unfinished = output_dir.with_name(output_dir.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    columns = ("id", "subreddit", "title", "post", "summary")
    posts = {split: [{key: row[key] for key in columns} for row in rows] for split, rows in posts.items()}
    for kind, splits in {"posts": posts, "comparisons": comparisons, "yardsticks": yardsticks}.items():
        for split, rows in splits.items():
            write_jsonl(unfinished / kind / f"{split}.jsonl", rows)
    if documents:
        write_jsonl(unfinished / "pretraining.jsonl", documents)
    tokenizer.save_pretrained(unfinished / "tokenizer")
    unfinished.rename(output_dir)
    pairs = len(comparisons["train"]) + len(comparisons["validation"])
    print(f"{output_dir}: {len(seen)} posts, {pairs} comparisons, tokenizer of {len(tokenizer)} tokens")


if __name__ == "__main__":
    main(tyro.cli(Args))
