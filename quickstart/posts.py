"""Generate small raw data in the schemas of TL;DR: posts, comparisons, and a tokenizer trained on them.

Every post hides six facts (a person, an age, an event, an object, a feeling, a question) among filler. A summary says
them in other words, so the truth about any summary is known: `quality(post, summary)` counts the facts that it covers.

    python quickstart/posts.py --output-dir data/quickstart/raw --seed 1

writes
    posts/{train,validation,test}.jsonl       id, subreddit, title, post, summary
    comparisons/{train,validation}.jsonl      info, summaries (two), choice, worker, batch, split, extra
    tokenizer/                                byte-level BPE, <|endoftext|> is id 0

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


@dataclass
class Args:
    output_dir: str = "data/quickstart/raw"
    """folder to write; it must not exist yet"""
    num_train: int = 2000
    """posts in the train split"""
    num_validation: int = 200
    """posts in the validation split"""
    num_test: int = 200
    """posts in the test split"""
    num_comparisons: int = 1000
    """pairs of summaries in the train split, about train posts"""
    num_validation_comparisons: int = 200
    """pairs in the validation split, about validation posts"""
    num_cnndm_comparisons: int = 60
    """further pairs in the validation split, about news articles (the schema of CNN/DM)"""
    label_noise: float = 0.25
    """share of the pairs whose choice is the worse summary (people agree with each other on about 3 pairs of 4)"""
    vocab_size: int = 1024
    """largest vocabulary of the tokenizer, <|endoftext|> included; a small corpus may give fewer tokens"""
    seed: int = 1
    """the same seed and sizes write the same bytes"""


# ---- the world: kind of fact -> {the words of a post, which name the value: the words of a summary} -----------------

# fmt: off
FACTS = {
    "person": {"sister": "sis", "brother": "bro", "mother": "mom", "best friend": "buddy", "girlfriend": "gf",
               "roommate": "flatmate", "boss": "manager", "coworker": "colleague"},
    "age": {str(age): str(age) for age in range(18, 60)},
    "event": {"broke": "wrecked", "lost": "misplaced", "sold": "got rid of", "stole": "took", "gave away": "donated",
              "spilled beer on": "soaked"},
    "object": {"laptop": "computer", "bike": "bicycle", "car": "vehicle", "phone": "mobile", "guitar": "instrument",
               "couch": "sofa", "jacket": "coat", "book": "novel"},
    "feeling": {"angry": "mad", "sad": "unhappy", "scared": "afraid", "confused": "puzzled", "guilty": "ashamed",
                "tired": "exhausted", "jealous": "envious"},
    "question": {"ask for the money": "get paid back", "wait for an apology": "expect a sorry",
                 "move out": "find a new place", "call the police": "report it", "talk about it": "speak up",
                 "forgive and forget": "let it go", "see a lawyer": "get legal help"},
}
# fmt: on

SUBREDDITS = ["relationships", "AskReddit", "tifu", "relationship_advice", "Advice", "legaladvice", "offmychest"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]

POST_SENTENCES = {  # one of each list is in every post
    "age": ["I'm {age} and new here.", "I am {age} years old.", "I just turned {age}.", "For context, I ({age}{sex})."],
    "event": [
        "On {day} my {person} {event} my {object}.",
        "Last {day} I found out that my {person} {event} my {object}.",
        "My {person} came over on {day} and {event} my {object}.",
        "So it turns out my {person} {event} the {object} that I had saved up for.",
    ],
    "feeling": ["I feel really {feeling}.", "Honestly I am so {feeling}.", "All of it makes me {feeling}."],
    "question": ["Should I {question}?", "Is it wrong to {question}?", "Would you {question}?"],
}
ARTICLE_SENTENCES = {  # the same facts, as news
    "age": ["The victim is {age} years old.", "A resident, {age}, spoke to this paper on {day}."],
    "event": [
        "The resident's {person} {event} the {object} on {day}.",
        "A {person} {event} the {object}, records show.",
    ],
    "feeling": ["The resident is said to be {feeling}.", 'A witness described the owner as "{feeling}".'],
    "question": ["The resident may {question}.", "The plan is to {question}, the paper has learned."],
}
TITLES = [
    "My {person} {event} my {object}",
    "Something happened to my {object} and I need advice",
    "Not sure what to do about my {person}",
    "I feel {feeling} because of my {person}",
]
FILLER = [
    "Sorry for the wall of text.",
    "English is not my first language.",
    "The weather has been awful all week.",
    "We usually have dinner together and watch some show.",
    "Nobody else in the house noticed anything.",
    "I tried to laugh about it at first.",
    "We have known each other for years.",
    "Work has been busy and I barely sleep.",
    "There was some music playing in the kitchen.",
    "My dog was barking the entire time.",
    "I keep going over it in my head.",
    "Other people tell me that I worry too much.",
    "It was raining and the bus was late.",
    "I had just come home with the groceries.",
    "Throwaway account for obvious reasons.",
    "Nothing like this has ever happened before.",
]
ARTICLE_FILLER = [
    "The paper could not reach anyone else for comment.",
    "Residents of the street were surprised.",
    "Traffic in the area was light.",
    "Several similar reports were made in past months.",
    "The mayor declined to comment.",
    "Rain is expected over the weekend.",
    "More details are expected soon.",
]

POLICIES = ["terse", "long", "copied_title", "invented", "reference", "complete"]
CNNDM_BATCHES = ["cnndm0", "cnndm2", "batch0_cnndm"]
FREE_WORDS = 20  # a summary of up to so many words has no length penalty


# ---- helpers --------------------------------------------------------------------------------------------------------


def fail(message: str):
    """End the process with one clear message on standard error and exit code 1."""
    raise SystemExit(f"error: {message}")


def find_facts(text: str) -> dict[str, set[str]]:
    """The values of each kind of fact that a text mentions, in the words of a post or of a summary."""
    text = text.lower()
    found = {kind: set() for kind in FACTS}
    found["age"] = set(re.findall(r"\b\d\d(?!\d)", text)) & set(FACTS["age"])  # also 24F and 24yo
    for kind, values in FACTS.items():
        if kind != "age":
            found[kind] = {v for v, said in values.items() if re.search(rf"\b({v}|{said})\b", text)}
    return found


def quality(post: str, summary: str) -> float:
    """The true score of a summary, any text: covered facts - wrong facts - 0.1 for each word beyond FREE_WORDS.

    A fact is covered when post and summary name the same value of its kind, and wrong when only the summary names it.
    """
    truth, said = find_facts(post), find_facts(summary)
    covered = sum(len(said[kind] & truth[kind]) for kind in FACTS)
    wrong = sum(len(said[kind] - truth[kind]) for kind in FACTS)
    return covered - wrong - 0.1 * max(0, len(summary.split()) - FREE_WORDS)


def draw_facts(rng: random.Random) -> dict[str, str]:
    """One value for each kind of fact."""
    return {kind: rng.choice(list(values)) for kind, values in FACTS.items()}


def write_text(facts: dict[str, str], sentences: dict[str, list[str]], filler: list[str], rng: random.Random) -> str:
    """Three paragraphs of the fact sentences, in order, with four to seven sentences of filler among them."""
    words = facts | {"day": rng.choice(DAYS), "sex": rng.choice("MF")}
    lines = [rng.choice(choices).format(**words) for choices in sentences.values()]
    for line in rng.sample(filler, rng.randint(4, 7)):
        lines.insert(rng.randint(0, len(lines)), line)
    first, second = sorted(rng.sample(range(1, len(lines)), 2))
    return "\n".join(" ".join(part) for part in (lines[:first], lines[first:second], lines[second:]))


def summarise(facts: dict[str, str], rng: random.Random) -> str:
    """A short summary of the given facts in the words of a summary; kinds that are not given are left out."""
    said = {kind: FACTS[kind][value] for kind, value in facts.items()}
    who = f"my {said['person']}" if "person" in said else "someone"
    event = f"{who} {said.get('event', 'did something to')} my {said.get('object', 'stuff')}"
    parts = [event] if {"person", "event", "object"} & set(said) else []
    if "age" in said:
        parts.insert(0, rng.choice([f"I'm {said['age']}", f"{said['age']}yo here", f"am {said['age']}"]))
    if "feeling" in said:
        parts.append(
            rng.choice([f"feeling {said['feeling']}", f"now I'm {said['feeling']}", f"very {said['feeling']}"])
        )
    if "question" in said:
        parts.append(rng.choice([f"should I {said['question']}?", f"wondering whether to {said['question']}."]))
    text = ", ".join(parts)
    return text if text.endswith(("?", ".")) else text + "."


def reference_facts(facts: dict[str, str], rng: random.Random) -> dict[str, str]:
    """What a reference summary tells: each fact with a chance of 4 in 5, and three at least."""
    kept = [kind for kind in facts if rng.random() < 0.8]
    return {kind: facts[kind] for kind in facts if kind in kept or len(kept) < 3}


def summary_of(policy: str, row: dict, rng: random.Random) -> str:
    """What a named policy writes about a row (facts, title and reference known), without leading space."""
    facts = row["facts"]
    if policy == "terse":
        return summarise({kind: facts[kind] for kind in rng.sample(list(facts), 2)}, rng)
    if policy == "long":
        return " ".join([summarise(facts, rng), *rng.sample(FILLER, 3)])
    if policy == "copied_title":
        return row["title"]
    if policy == "invented":
        told = reference_facts(facts, rng)
        for kind in rng.sample(list(told), 2):
            told[kind] = rng.choice([value for value in FACTS[kind] if value != facts[kind]])
        return summarise(told, rng)
    return row["summary"] if policy == "reference" else summarise(facts, rng)


def compare(row: dict, split: str, args: Args, rng: random.Random) -> dict:
    """One comparison about a row in the raw schema; `split` is train, valid1 or valid2."""
    text = row["article"] or row["post"]
    gap = 0.0
    while gap == 0.0:  # a pair of equal quality has no right choice
        policies = rng.sample(POLICIES, 2)
        summaries = [summary_of(policy, row, rng) for policy in policies]
        gap = round(quality(text, summaries[1]) - quality(text, summaries[0]), 6)
    choice = int(gap > 0)
    if rng.random() < args.label_noise:
        choice = 1 - choice
    # one scale from 1 (surely the first) to 9 (surely the second); 5 would be no choice. The side is the choice's and
    # the distance follows the gap
    level = min(4, 1 + int(abs(gap) / 1.5))
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
    """A byte-level BPE tokenizer with the settings of the GPT-NeoX one; <|endoftext|> is id 0."""
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
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(args: Args):
    # ---- arguments --------------------------------------------------------------------------------------------------
    for name in ("num_train", "num_validation", "num_test", "num_comparisons", "num_validation_comparisons"):
        if getattr(args, name) < 1:
            fail(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be 1 or more")
    if args.num_cnndm_comparisons < 0:
        fail(f"--num-cnndm-comparisons is {args.num_cnndm_comparisons}; it must be 0 or more")
    if not 0 <= args.label_noise <= 1:
        fail(f"--label-noise is {args.label_noise}; it must lie between 0 and 1")
    if args.vocab_size < 257:
        fail(f"--vocab-size is {args.vocab_size}; it must be 257 (256 bytes and <|endoftext|>) or more")
    output_dir = Path(args.output_dir)
    if output_dir.exists():
        fail(f"{output_dir} exists; remove it (rm -r {output_dir}) or name another --output-dir")
    console = Console(stderr=True)

    def progress(count: int, description: str):
        return track(range(count), description, console=console, transient=True, disable=not sys.stderr.isatty())

    # ---- posts ------------------------------------------------------------------------------------------------------
    posts, seen = {}, set()
    for split, count in (("train", args.num_train), ("validation", args.num_validation), ("test", args.num_test)):
        rng = random.Random(f"{args.seed} posts {split}")  # one stream a split: sizes do not change other splits
        posts[split] = []
        for i in progress(count, f"posts, {split}"):
            post = None
            while post is None or post in seen:  # no text is in two splits, or twice in one
                facts = draw_facts(rng)
                post = write_text(facts, POST_SENTENCES, FILLER, rng)
            seen.add(post)
            row = {"id": f"{split}_{i:06d}", "subreddit": rng.choice(SUBREDDITS)}
            row |= {"title": rng.choice(TITLES).format(**facts), "post": post}
            row |= {"summary": summarise(reference_facts(facts, rng), rng)}
            posts[split].append(row | {"facts": facts, "site": None, "article": None})
    train_ids, train_texts = ({row[key] for row in posts["train"]} for key in ("id", "post"))
    for row in posts["validation"] + posts["test"]:
        assert row["id"] not in train_ids and row["post"] not in train_texts, f"{row['id']} is also in train"

    # ---- comparisons ------------------------------------------------------------------------------------------------
    comparisons = {}
    for split, count in (("train", args.num_comparisons), ("validation", args.num_validation_comparisons)):
        rng = random.Random(f"{args.seed} comparisons {split}")
        splits = ["train"] if split == "train" else ["valid1", "valid2"]
        comparisons[split] = [
            compare(rng.choice(posts[split]), rng.choice(splits), args, rng)
            for _ in progress(count, f"comparisons, {split}")
        ]
    rng = random.Random(f"{args.seed} comparisons cnndm")
    for i in range(args.num_cnndm_comparisons):
        facts = draw_facts(rng)
        row = {"id": f"cnndm_{i:06d}", "subreddit": None, "post": None, "site": "cnn", "facts": facts}
        row |= {"article": write_text(facts, ARTICLE_SENTENCES, ARTICLE_FILLER, rng)}
        row |= {"title": f"News about a {facts['object']}"}  # for copied_title alone
        row |= {"summary": summarise(reference_facts(facts, rng), rng)}
        comparison = compare(row, "valid2", args, rng)
        comparison["info"]["title"] = None
        comparisons["validation"].append(comparison)

    # ---- tokenizer: trained on what a model will read ---------------------------------------------------------------
    texts = [
        f"SUBREDDIT: r/{r['subreddit']}\n\nTITLE: {r['title']}\n\nPOST: {r['post']}\n\nTL;DR:" for r in posts["train"]
    ]
    texts += [f" {row['summary']}" for row in posts["train"]]
    texts += [summary["text"] for row in comparisons["train"] for summary in row["summaries"]]
    tokenizer = train_tokenizer(texts, args.vocab_size)
    assert tokenizer.eos_token_id == 0, f"<|endoftext|> has id {tokenizer.eos_token_id}, not 0"

    # ---- save: beside, then renamed, so that the folder is whole or absent ------------------------------------------
    unfinished = output_dir.with_name(output_dir.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    columns = ("id", "subreddit", "title", "post", "summary")
    for split, rows in posts.items():
        write_jsonl(unfinished / "posts" / f"{split}.jsonl", [{key: row[key] for key in columns} for row in rows])
    for split, rows in comparisons.items():
        write_jsonl(unfinished / "comparisons" / f"{split}.jsonl", rows)
    tokenizer.save_pretrained(unfinished / "tokenizer")
    unfinished.rename(output_dir)
    sizes = ", ".join(f"{len(rows)} {split}" for split, rows in posts.items())
    pairs = ", ".join(f"{len(rows)} {split}" for split, rows in comparisons.items())
    print(f"{output_dir}: posts {sizes}; comparisons {pairs}; tokenizer of {len(tokenizer)} tokens")


if __name__ == "__main__":
    main(tyro.cli(Args))
