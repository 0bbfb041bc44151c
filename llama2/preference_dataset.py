"""Preference sets of many kinds -> one pre-tokenised mixture with graded margins (Llama 2, sections 3.2.1 and 3.2.2).

    python ensembles/alpaca_dataset.py --base EleutherAI/pythia-1.4b --output-dir data/alpaca  # a base with turns
    python llama2/preference_dataset.py --base data/alpaca/base --output-dir data/llama2 --bad-rows skip \
        --sources helpful=hh:raw/hh/helpful-base/train.jsonl.gz:train:helpfulness \
        helpful=hh:raw/hh/helpful-base/test.jsonl.gz:validation:helpfulness \
        harmless=hh:raw/hh/harmless-base:safety shp=shp:raw/shp steer=helpsteer2:raw/HelpSteer2/preference \
        --mix helpful=0.4 harmless=0.1 shp=0.25 steer=1/4
    python sft.py --model data/llama2/base --seed 1 --dataset data/llama2/sft
    python llama2/reward.py --sft-model-path runs/sft/base/1 --dataset data/llama2/sft \
        --preference-dataset data/llama2/preference --margin small

A source is name=reader:path[:train|:validation][:helpfulness|:safety]. Its path is a file or a folder of files: JSON
Lines, a JSON array or Parquet; JSON may be gzipped. (`hf download Anthropic/hh-rlhf --repo-type dataset --local-dir
raw/hh` fetches a published set.) The reader knows the published columns:

    hh              Anthropic helpful and harmless: chosen, rejected (transcripts of Human and Assistant)
    tldr            OpenAI summarize, comparisons: info, summaries, choice, extra.confidence
    webgpt          OpenAI WebGPT comparisons: two records of question, answer, score, as in comparisons.jsonl, or
                    the Hub's question, answer_0, answer_1, score_0, score_1
    stack_exchange  HuggingFaceH4/stack-exchange-preferences: question, answers (text, pm_score)
    shp             Stanford Human Preferences: history, human_ref_A, human_ref_B, labels, score_A, score_B
    gptj            Synthetic GPT-J: prompt, chosen, rejected
    helpsteer2      HelpSteer2: prompt, response_1, response_2, preference_strength (-3 to 3)
    strength        chosen, rejected (messages), preference_strength (0 to 3)
    five_levels     prompt, completion_a, completion_b, preference (a-is-better to b-is-better, tie)
    pairs           your own: prompt or messages, chosen, rejected; optionally rating, chosen_safe and rejected_safe

Grades are Llama 2's four (section 3.2.1), with the small margins of its table 27: significantly 1, better 2/3, slightly
1/3, negligibly 0. A source without grades has `none` and margin 0, which is equation 1. How numbers become grades:

- tldr: confidence runs from 1 (surely the first) to 9 (surely the second), so its distance to 5 counts: 4
  significantly, 3 better, 2 slightly, 0 or 1 negligibly. Without a confidence, the grade is none.
- shp: log2 of the ratio of the two scores (scores below 1 count as 1): from 3 significantly, from 2 better, from 1
  slightly, else negligibly. stack_exchange: the difference of pm_score, which is log2(1 + votes), rounded, plus 1 if
  accepted, by the same rule. Each question gives one pair, its best and its worst answer.
- webgpt: the size of score_0 (from -1 to 1, and -score_1): from 3/4, 1/2, 1/4, else. 0 is a tie, as in its paper.
- helpsteer2, strength: 3, 2, 1; 0 ("about the same") is a tie. five_levels: better, slightly, tie.
- pairs: `rating` is a grade's name, "tie", or a number from 0, which is the margin itself.

A dialogue becomes <|prompter|>TEXT<|endoftext|><|assistant|>TEXT<|endoftext|>…, as in ensembles/alpaca_dataset.py; its
query ends with <|assistant|>, its response is TEXT<|endoftext|>. If --base lacks these two tokens, OUTPUT_DIR/base is a
copy that has them; make everything else with that copy. Posts (tldr) keep the format of tldr_dataset.py. A dialogue
over --max-query-length loses its oldest exchanges, a post its end (Detail 2).

The following rows are left out and counted: what is still too long; ties, unless --ties half; pairs whose chosen
response is unsafe and whose rejected one is safe (section 3.2.1); and exact duplicates in any source, of which the
first stays. Any other bad row ends the run with file and row, or is left out and counted with --bad-rows skip.

Splits: a pair is in validation if its source says so, or else by a hash of the seed and its dialogue's first turn (for
a post, the whole post), so the stages of one dialogue stay together. No prompt is on both sides: a train source loses
the prompts that any other source has in validation, and so does a shortened dialogue whose first turn and first
remaining turn fall on different sides. To keep a set's published split, give its files as sources of their own,
name=reader:train.jsonl:train name=reader:test.jsonl:validation. --mix concerns train only. Validation keeps all pairs
but ties; `batch` names their source, by which llama2/reward.py --run-eval groups accuracies.

Writes OUTPUT_DIR/preference: the columns of tldr_dataset.py's preference data without the raw ones, and margin, grade,
weight, source, tag (helpfulness or safety), turns, chosen_safe, rejected_safe. OUTPUT_DIR/sft holds its prompts, each
once, with a chosen response that is not labelled unsafe as the reference; use it to train a chat model, to centre
rewards and to sample from in PPO. OUTPUT_DIR/statistics holds table_6 (the paper's), counts, grades and safety. Rows
are processed as a stream. Disk: 8 bytes x (5 x query + 6 x response length) a pair, 64 KiB at the defaults, and twice
that while it is written.
"""

import bisect
import codecs
import gzip
import hashlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import pyarrow.parquet
import torch
import tyro
from datasets import Dataset, DatasetDict, Features, List, Value
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "eval")]

from eval_helpers import fail, markdown, or_fail  # noqa: E402

from ppo import checkpoint_folder  # noqa: E402
from tldr_dataset import (  # noqa: E402
    encode,
    format_query,
    mask_query,
    text_field,
    truncate_query,
    unfinished_folder,
)

TURNS = "<|prompter|>", "<|assistant|>"
MARGINS = {"significantly": 1.0, "better": 2 / 3, "slightly": 1 / 3, "negligibly": 0.0, "none": 0.0}  # table 27, small
RATINGS = {grade: grade for grade in (*MARGINS, "tie")} | {"unsure": "negligibly"}
RATINGS |= {f"{grade} better": grade for grade in ("significantly", "slightly", "negligibly")}
RATINGS |= {"negligibly better / unsure": "negligibly"}
CHOSEN = [f"{name}{end}" for name in ("chosen", "query_chosen") for end in ("", "_token", "_token_len")]
# chosen becomes reference_response
SFT_COLUMNS = ["id", "source", "tag", "query", "query_token", "query_token_len", *CHOSEN]
SFT_COLUMNS += ["query_chosen_token_response_label"]
# (chosen is safe, rejected is safe) -> Llama 2's safety bin (section 3.2.1); None where a label is missing
SAFETY = {(True, False): "chosen alone safe", (True, True): "both safe", (False, False): "both unsafe"}
SPLITS, TAGS = ("train", "validation"), ("helpfulness", "safety")
BATCH = 500  # pairs padded and written at a time


@dataclass
class Args:
    sources: tuple[str, ...]
    """name=reader:path[:train|:validation][:helpfulness|:safety], any number; a name may come more than once"""
    base: str = "EleutherAI/pythia-1.4b"
    """model that will be trained: Hub id[@revision], checkpoint folder or run folder"""
    output_dir: str = "data/llama2"
    """folder to write; it must not hold anything yet"""
    mix: tuple[str, ...] = ()
    """name=share of every source in train, such as shp=0.25 or shp=1/4, 1 in all; default: all pairs there are"""
    train_pairs: int | None = None
    """pairs in train, with --mix; default: as many as the shares allow"""
    validation_share: float = 0.05
    """share of the prompts of a source without a split that are in validation"""
    ties: Literal["drop", "half"] = "drop"
    """equal preference: left out, or in train as two pairs, one in each order, each of weight 0.5"""
    bad_rows: Literal["error", "skip"] = "error"
    """a row that is wrong ends the run, or is left out and counted"""
    max_query_length: int = 1024
    """tokens of dialogue or post before the response"""
    max_response_length: int = 512
    """tokens of a response, EOS included"""
    seed: int = 1
    """of split, mix and order"""


# ---- raw rows ------------------------------------------------------------------------------------


def parse_source(text: str) -> dict:
    """name=reader:path[:split][:tag] -> its parts and the files at path; split and tag are None where not given."""
    name, _, rest = text.partition("=")
    reader, _, path = rest.partition(":")
    if not re.fullmatch(r"[\w.-]+", name) or reader not in READERS or not path:
        fail(
            f"--sources {text}: write name=reader:path[:train|:validation][:helpfulness|:safety]; the readers are "
            f"{', '.join(READERS)}"
        )
    found = {"split": None, "tag": None}
    for key, values in (("tag", TAGS), ("split", SPLITS)):
        head, _, last = path.rpartition(":")
        if last in values and head:
            path, found[key] = head, last
    place = Path(path).expanduser()
    endings = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")
    files = sorted(x for x in place.rglob("*") if x.name.endswith(endings)) if place.is_dir() else [place]
    if not files or not files[0].is_file() or not files[0].name.endswith(endings):
        fail(f"--sources {text}: no file {', '.join(f'*{ending}' for ending in endings)} at {path}")
    return {"name": name, "reader": reader, "files": files} | found


def parse_mix(mix: tuple[str, ...], names: list[str]) -> dict[str, Fraction]:
    """{name: share} in the order of names; {} without --mix."""
    shares = {}
    for text in mix:
        name, _, share = text.partition("=")
        try:
            shares[name] = Fraction(share)
        except (ValueError, ZeroDivisionError):
            fail(f"--mix {text}: write name=share, with a share such as 0.25 or 1/4")
    if mix and (sorted(shares) != sorted(names) or len(mix) != len(names)):
        fail(f"--mix {' '.join(mix)}: name every source once; the sources are {', '.join(names)}")
    if mix and (sum(shares.values()) != 1 or min(shares.values()) <= 0):
        fail(f"--mix {' '.join(mix)}: the shares are above 0 and add up to 1, not {float(sum(shares.values())):g}")
    return {name: shares[name] for name in names if mix}


def opened(path: Path):
    """A file of JSON, gzipped or not, as bytes."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def is_array(path: Path) -> bool:
    """Does this .json file hold one array, and not an object in each line?"""
    with opened(path) as file:
        start = file.read(64).removeprefix(codecs.BOM_UTF8).lstrip()
        return path.name.endswith((".json", ".json.gz")) and start.startswith(b"[")


def stream_rows(path: Path) -> Iterator[tuple[str, object]]:
    """(where, row) of a file, one at a time; `where` names file and row (JSON Lines: the line), from 1. An array, and
    nothing else, is read at once."""
    if path.suffix == ".parquet":
        with or_fail(f"{path} cannot be read"):
            batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=BATCH)
            for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
                yield f"{path}, row {number}", row
        return
    with or_fail(f"{path} cannot be read"), opened(path) as file:
        array = is_array(path)
        for number, row in enumerate(json.load(file) if array else file, 1):
            where = f"{path}, row {number}"
            if array or row.strip():
                with or_fail(f"{where} cannot be read"):
                    row = row if array else json.loads(row)
                yield where, row


def number_field(record: dict, field: str, low: float, high: float) -> float:
    """record[field], which must be a number from low to high (a text that spells one will do, as in stack_exchange)."""
    value = record.get(field)
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not low <= found <= high:
        raise ValueError(f"{field} should be a number from {low:g} to {high:g}, not {value!r:.80}")
    return found


# ---- readers: one row -> what it compares -----------------------------------------------------------
# Each returns chosen and rejected (texts), messages (the dialogue before them) or post (what format_query takes), and
# grade: of MARGINS, or "tie"; and what else it knows of margin, chosen_safe, rejected_safe, choice, confidence and
# policies. ValueError says what is wrong with the row.


def grade_of(gap: float, cuts: tuple[float, float, float]) -> str:
    """The grade of a gap: from cuts[2] significantly, from cuts[1] better, from cuts[0] slightly, else negligibly; 0 is
    a tie."""
    return ("negligibly", "slightly", "better", "significantly")[bisect.bisect_right(cuts, gap)] if gap else "tie"


def user(text: str) -> list[dict]:
    """A dialogue of one turn."""
    return [{"role": "user", "content": text}]


def by_choice(texts: list[str], choice: int) -> dict:
    """chosen, rejected and choice of two texts, of which texts[choice] is preferred."""
    return {"chosen": texts[choice], "rejected": texts[1 - choice], "choice": choice}


def by_last_turn(chosen: list[dict], rejected: list[dict]) -> dict:
    """messages, chosen and rejected of two dialogues that differ in their last turn, the assistant's."""
    if chosen[:-1] != rejected[:-1]:
        raise ValueError("chosen and rejected are not the same dialogue up to their last turn")
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        if not messages or messages[-1].get("role") != "assistant":
            raise ValueError(f"{name} does not end with a turn of the assistant")
    return {"messages": chosen[:-1], "chosen": chosen[-1].get("content"), "rejected": rejected[-1].get("content")}


def read_hh(row: dict) -> dict:
    sides = []
    for field in ("chosen", "rejected"):
        head, *turns = re.split(r"\n\n(Human|Assistant):", text_field(row, field, field))
        if head.strip() or not turns:
            raise ValueError(f"{field} does not begin with a turn, 'Human:' after an empty line")
        roles = ["user" if turn == "Human" else "assistant" for turn in turns[::2]]
        said = [text.strip() for text in turns[1::2]]
        sides.append([{"role": role, "content": text} for role, text in zip(roles, said, strict=True)])
    return by_last_turn(*sides) | {"grade": "none"}


def read_tldr(row: dict) -> dict:
    info, summaries, choice, extra = row.get("info"), row.get("summaries"), row.get("choice"), row.get("extra")
    article = isinstance(info, dict) and info.get("article") is not None
    for field in ("article",) if article else ("title", "post"):
        text_field(info, field, f"info.{field}")
    if not isinstance(summaries, list) or len(summaries) != 2:
        raise ValueError(f"summaries should be a list of two, not {summaries!r:.80}")
    if type(choice) is not int or choice not in (0, 1):
        raise ValueError(f"choice should be 0 or 1, not {choice!r:.80}")
    confidence = extra.get("confidence") if isinstance(extra, dict) else None
    if confidence is not None and (type(confidence) is not int or not 1 <= confidence <= 9):
        raise ValueError(f"extra.confidence should be an integer from 1 to 9, or null, not {confidence!r:.80}")
    texts = [text_field(summary, "text", f"summaries[{i}].text") for i, summary in enumerate(summaries)]
    policies = [text_field(summary, "policy", "policy", required=False) for summary in summaries]
    grade = "none" if confidence is None else grade_of(max(abs(confidence - 5), 1), (2, 3, 4))
    found = {"post": info, **by_choice(texts, choice), "grade": grade, "confidence": confidence}
    return found | {"policies": policies}


def read_webgpt(row: dict | list) -> dict:
    if isinstance(row, list):  # as published: an answer and its score in each of two records
        if len(row) != 2 or not all(isinstance(record, dict) for record in row):
            raise ValueError(f"a row should be two records, not {row!r:.80}")
        if row[0].get("question") != row[1].get("question"):
            raise ValueError("the two records are of different questions")
        answers = {f"{name}_{i}": record.get(name) for i, record in enumerate(row) for name in ("answer", "score")}
        row = {"question": row[0].get("question")} | answers
    prompt = text_field(row.get("question"), "full_text", "question.full_text")
    score = number_field(row, "score_0", -1, 1)
    if number_field(row, "score_1", -1, 1) != -score:
        raise ValueError(f"score_0 and score_1 should add up to 0, not {score} and {row['score_1']}")
    texts = [text_field(row, field, field) for field in ("answer_0", "answer_1")]
    grade = grade_of(abs(score), (1 / 4, 1 / 2, 3 / 4))
    return {"messages": user(prompt), **by_choice(texts, int(score < 0)), "grade": grade}


def read_stack_exchange(row: dict) -> dict:
    prompt, answers = text_field(row, "question", "question"), row.get("answers")
    if not isinstance(answers, list) or len(answers) < 2:
        raise ValueError(f"answers should be a list of two or more, not {answers!r:.80}")
    texts = [text_field(answer, "text", f"answers[{i}].text") for i, answer in enumerate(answers)]
    scores = [number_field(answer, "pm_score", -1, 1000) for answer in answers]
    best, worst = scores.index(max(scores)), scores.index(min(scores))
    worst = worst if worst != best else 1  # all scores are equal: a tie of the first two
    found = {"messages": user(prompt), "chosen": texts[best], "rejected": texts[worst]}
    return found | {"grade": grade_of(scores[best] - scores[worst], (1, 2, 3))}


def read_shp(row: dict) -> dict:
    prompt = text_field(row, "history", "history")
    texts = [text_field(row, field, field) for field in ("human_ref_A", "human_ref_B")]
    if row.get("labels") not in (0, 1):
        raise ValueError(f"labels should be 0 or 1, not {row.get('labels')!r:.80}")
    choice = 1 - int(row["labels"])  # labels: 1 if A is preferred
    scores = [max(number_field(row, field, -1e9, 1e9), 1) for field in ("score_A", "score_B")]
    doublings = math.log2(scores[choice] / scores[1 - choice])
    if doublings < 0:
        raise ValueError(f"labels is {row['labels']}, but {'AB'[choice]} has the lower score")
    return {"messages": user(prompt), **by_choice(texts, choice), "grade": grade_of(doublings, (1, 2, 3))}


def read_gptj(row: dict) -> dict:
    prompt, chosen, rejected = (text_field(row, field, field) for field in ("prompt", "chosen", "rejected"))
    return {"messages": user(prompt), "chosen": chosen, "rejected": rejected, "grade": "none"}


def read_helpsteer2(row: dict) -> dict:
    # the turns of a longer prompt stand between lines <extra_id_1>Assistant and <extra_id_1>User
    turns = re.split(r"\n*<extra_id_1>(?:User|Assistant)\n", text_field(row, "prompt", "prompt"))
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    texts = [text_field(row, field, field) for field in ("response_1", "response_2")]
    strength = number_field(row, "preference_strength", -3, 3)  # above 0: response_2 is better
    return {"messages": messages, **by_choice(texts, int(strength > 0)), "grade": grade_of(abs(strength), (1, 2, 3))}


def read_strength(row: dict) -> dict:
    for field in ("chosen", "rejected"):
        check_messages(row.get(field), field)
    grade = grade_of(number_field(row, "preference_strength", 0, 3), (1, 2, 3))
    return by_last_turn(row["chosen"], row["rejected"]) | {"grade": grade}


def read_five_levels(row: dict) -> dict:
    prompt = text_field(row, "prompt", "prompt")
    texts = [text_field(row, field, field) for field in ("completion_a", "completion_b")]
    levels = {"tie": (0, "tie")}
    for choice, name in enumerate("ab"):
        levels |= {f"{name}-is-better": (choice, "better"), f"{name}-is-slightly-better": (choice, "slightly")}
    if not isinstance(row.get("preference"), str) or row["preference"] not in levels:
        raise ValueError(f"preference should be one of {', '.join(levels)}, not {row.get('preference')!r:.80}")
    choice, grade = levels[row["preference"]]
    return {"messages": user(prompt), **by_choice(texts, choice), "grade": grade}


def read_pairs(row: dict) -> dict:
    messages = row["messages"] if row.get("messages") is not None else user(text_field(row, "prompt", "prompt"))
    found = {"messages": messages, "grade": "none"}
    found |= {field: text_field(row, field, field) for field in ("chosen", "rejected")}
    rating = row.get("rating")
    if isinstance(rating, str):
        if rating.lower() not in RATINGS:
            raise ValueError(f"rating: unknown grade {rating!r:.80}; known are {', '.join(RATINGS)}, and numbers")
        found["grade"] = RATINGS[rating.lower()]
    elif rating is not None:
        found["margin"] = number_field(row, "rating", 0, 1e6)
    for field in ("chosen_safe", "rejected_safe"):
        if row.get(field) not in (True, False, None) or type(row.get(field)) is int:
            raise ValueError(f"{field} should be true, false or null, not {row[field]!r:.80}")
        found[field] = row.get(field)
    return found


READERS = {
    "hh": read_hh,
    "tldr": read_tldr,
    "webgpt": read_webgpt,
    "stack_exchange": read_stack_exchange,
    "shp": read_shp,
    "gptj": read_gptj,
    "helpsteer2": read_helpsteer2,
    "strength": read_strength,
    "five_levels": read_five_levels,
    "pairs": read_pairs,
}


def check_messages(messages: object, name: str):
    """ValueError unless messages is a list of turns with a text each, the user's and the assistant's by turns."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{name} should be a list of turns, not {messages!r:.80}")
    for i, message in enumerate(messages):
        role = ("user", "assistant")[i % 2]
        text_field(message, "content", f"{name}: turn {i + 1}: content")
        if message.get("role") != role:
            raise ValueError(f"{name}: turn {i + 1} is of role {message.get('role')!r:.80}, and should be of {role}")


def check_pair(pair: dict):
    """ValueError unless the dialogue ends with the user, and both responses have a text, not the same."""
    if "messages" in pair:
        check_messages(pair["messages"], "messages")
        if len(pair["messages"]) % 2 == 0:
            raise ValueError("messages: the last turn, before the response, is of role 'assistant', not of user")
        for text in (*(message["content"] for message in pair["messages"]), pair["chosen"], pair["rejected"]):
            if turn := next((turn for turn in TURNS if turn in str(text)), None):
                raise ValueError(f"a text holds {turn}, which would begin a turn")
    for side in ("chosen", "rejected"):
        text_field(pair, side, side)
    if pair["chosen"].strip() == pair["rejected"].strip():
        raise ValueError("chosen and rejected are equal")


def digest(*parts: object) -> bytes:
    """16 bytes that tell these parts apart from others."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).digest()


# ---- tokens ------------------------------------------------------------------------------------------


def dialogue_columns(pair: dict, tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict | None:
    """Query, responses and their unpadded tokens of a dialogue, without its oldest exchanges where it has more than
    max_length tokens; None if its last turn alone has."""
    messages, (eos, eos_id) = pair["messages"], (tokenizer.eos_token, tokenizer.eos_token_id)
    prompter, assistant = tokenizer.convert_tokens_to_ids(list(TURNS))
    texts = [*(message["content"] for message in messages), pair["chosen"], pair["rejected"]]
    *turns, chosen, rejected = encode(tokenizer, texts)  # in one call: most of the time goes into calls
    lengths = [len(turn) + 2 for turn in turns]  # a token before each, EOS after it
    first = 0
    while sum(lengths[first:]) + 1 > max_length:
        first += 2
        if first >= len(turns):
            return None
    text = "".join(f"{TURNS[i % 2]}{messages[i]['content']}{eos}" for i in range(first, len(turns))) + TURNS[1]
    query = [token for i in range(first, len(turns)) for token in ((prompter, assistant)[i % 2], *turns[i], eos_id)]
    query.append(assistant)
    columns = {"query": text, "query_token": query, "cut": first > 0}
    columns["prompts"] = {messages[0]["content"], messages[first]["content"]}
    columns |= {"turns": (len(turns) - first + 1) // 2, "prompt_tokens": len(turns[-1])}
    columns["context_tokens"] = sum(map(len, turns[first:]))
    for side, tokens in (("chosen", chosen + [eos_id]), ("rejected", rejected + [eos_id])):
        columns |= {side: pair[side] + eos, f"{side}_token": tokens, f"query_{side}_token": query + tokens}
    return columns


def post_columns(pair: dict, tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict | None:
    """The same of a TL;DR post or CNN/DM article, as tldr_dataset.py makes them (Details 2 and 3)."""
    try:
        text, query = truncate_query(pair["post"], tokenizer, max_length)
    except ValueError:  # too long without its post
        return None
    columns = {"query": text, "query_token": query, "prompts": {text}, "cut": text != format_query(pair["post"])}
    columns |= {"turns": 1, "prompt_tokens": len(query), "context_tokens": len(query)}
    for side in ("chosen", "rejected"):
        response = pair[side] if pair[side].startswith(" ") else f" {pair[side]}"
        columns |= {side: response + tokenizer.eos_token}
        for name, whole in ((f"{side}_token", response), (f"query_{side}_token", text.strip() + response)):
            columns[name] = encode(tokenizer, whole) + [tokenizer.eos_token_id]
    return columns


# ---- from rows to a mixture ------------------------------------------------------------------------------


def stored_features() -> Features:
    """Names and types of what is stored between reading and mixing: tokens without padding; source and grade are
    numbers; `second` marks the other order of the tie before it; response_tokens counts those of both responses."""
    text, number, tokens = Value("string"), Value("int32"), List(Value("int32"))
    features = dict.fromkeys(("id", "tag", "policies", "chosen_policy", "rejected_policy"), text)
    features |= dict.fromkeys(("source", "grade", "turns", "choice", "confidence"), number)
    features |= dict.fromkeys(("context_tokens", "prompt_tokens", "response_tokens"), number)
    features |= dict.fromkeys(("validation", "second", "chosen_safe", "rejected_safe"), Value("bool"))
    features |= dict.fromkeys(("margin", "weight"), Value("float64")) | {"query_key": Value("int64")}
    for name in ("query", "chosen", "rejected"):
        features |= {name: text, f"{name}_token": tokens}
    return Features(features | {"query_chosen_token": tokens, "query_rejected_token": tokens})


def stored_pairs(sources: list[dict], tokenizer, args: Args, counts: dict[str, Counter]) -> Iterator[dict]:
    """The pairs of all sources, one at a time, as stored_features(); `counts`, by source, tells what becomes of the
    rows. In memory: a digest of every pair, and one of every prompt in validation."""
    seen, held_out, names, grades = set(), set(), list(counts), list(MARGINS)
    # validation first, train last: only then is it known what is held out
    for source in sorted(sources, key=lambda source: ("validation", None, "train").index(source["split"])):
        count = counts[source["name"]]
        for file in source["files"]:
            for where, row in stream_rows(file):
                count["rows"] += 1
                try:
                    if not isinstance(row, dict) and not (isinstance(row, list) and source["reader"] == "webgpt"):
                        raise ValueError(f"not an object, but {row!r:.80}")
                    pair = READERS[source["reader"]](row)
                    tie = pair["grade"] == "tie"
                    if tie and args.ties == "drop":
                        count["ties"] += 1
                        continue
                    check_pair(pair)
                except ValueError as error:
                    if args.bad_rows == "error":
                        fail(f"{where}: {error} (--bad-rows skip leaves such rows out)")
                    count["bad rows"] += 1
                    continue
                safe = (pair.get("chosen_safe"), pair.get("rejected_safe"))
                if safe == (False, True) or (tie and safe == (True, False)):  # section 3.2.1
                    count["unsafe chosen"] += 1
                    continue
                grade = "negligibly" if tie else pair["grade"]
                margin = pair.get("margin", MARGINS[grade])
                before = pair["messages"] if "messages" in pair else format_query(pair["post"])
                responses = [pair["chosen"], pair["rejected"]]
                same = digest(before, sorted(responses) if tie else responses, pair["grade"], margin)
                if same in seen:
                    count["duplicates"] += 1
                    continue
                seen.add(same)
                made = dialogue_columns if "messages" in pair else post_columns
                columns = made(pair, tokenizer, args.max_query_length)
                if columns is None:
                    count["prompt too long"] += 1
                    continue
                lengths = [len(columns[f"{side}_token"]) for side in ("chosen", "rejected")]
                joined = max(len(columns[f"query_{side}_token"]) for side in ("chosen", "rejected"))
                width = args.max_query_length + args.max_response_length  # a post may join into more tokens than both
                if max(lengths) > args.max_response_length or joined > width:
                    count["response too long"] += 1
                    continue
                keys, split = {digest(args.seed, prompt) for prompt in columns["prompts"]}, source["split"]
                kept_out = {key in held_out for key in keys}
                if split is None:
                    below = args.validation_share * 2**64
                    kept_out = {key in held_out or int.from_bytes(key[:8], "big") < below for key in keys}
                    split = "validation" if kept_out == {True} else "train"
                if split == "train" and True in kept_out:
                    count["prompt in validation"] += 1
                    continue
                if tie and split == "validation":
                    count["ties"] += 1
                    continue
                if split == "validation":
                    held_out |= keys
                count[split] += 1
                count["ties halved"] += tie
                count["shortened"] += columns["cut"]
                columns |= {"id": f"{source['name']}_{count['rows']:07d}", "tag": source["tag"], "margin": margin}
                columns |= {"source": names.index(source["name"]), "grade": grades.index(grade)}
                columns |= {"validation": split == "validation", "weight": 0.5 if tie else 1.0, "second": False}
                columns |= {"choice": pair.get("choice"), "confidence": pair.get("confidence")}
                columns["query_key"] = int.from_bytes(digest(columns["query"])[:8], "big", signed=True)
                columns |= {"chosen_safe": safe[0], "rejected_safe": safe[1], "response_tokens": sum(lengths) - 2}
                if "policies" in pair:
                    columns["chosen_policy"] = pair["policies"][pair["choice"]]
                    columns["rejected_policy"] = pair["policies"][1 - pair["choice"]]
                    columns["policies"] = "--".join(sorted(policy or "null" for policy in pair["policies"]))
                yield columns
                if tie:
                    yield other_order(columns)


def other_order(columns: dict) -> dict:
    """The stored columns of a pair with chosen and rejected exchanged."""
    sides = {"chosen": "rejected", "rejected": "chosen"}
    found = {re.sub("chosen|rejected", lambda side: sides[side[0]], name): x for name, x in columns.items()}
    choice = None if columns["choice"] is None else 1 - columns["choice"]
    return found | {"second": True, "choice": choice}


def mix_counts(shares: dict[str, Fraction], available: dict[str, int], total: int | None) -> dict[str, int]:
    """Pairs to take of each source: exactly share x total of them; total None is the largest that can be met."""
    step = math.lcm(*(share.denominator for share in shares.values()))
    name = min(shares, key=lambda name: available[name] / shares[name])  # the first to run out
    largest = math.floor(available[name] / shares[name]) // step * step
    total = largest if total is None else total
    if not 0 < total <= largest or total % step:
        nearest = min(largest, max(step, round(total / step) * step))
        fail(
            f"--mix: the shares of {total:,} pairs cannot be met: {name} has {available[name]:,} pairs in train for "
            f"its share of {float(shares[name]):g}, and exact shares need a multiple of {step:,}; "
            + (f"--train-pairs {nearest} can be met" if nearest else "no number can be met")
        )
    return {name: int(share * total) for name, share in shares.items()}


def mixed_rows(frame: pd.DataFrame, names: list[str], take: dict[str, int], seed: int) -> np.ndarray:
    """Stored rows of train in a random order: take[name] pairs drawn from each source, or, where take is empty, all; a
    tie's two rows follow each other. A larger take has all pairs of a smaller one."""
    drawn = []
    for i, name in enumerate(names):
        pairs = np.flatnonzero((frame["source"] == i) & ~frame["validation"] & ~frame["second"])
        drawn.append(np.random.default_rng([seed, i]).permutation(pairs)[: take.get(name)])
    pairs = np.random.default_rng([seed, len(names)]).permutation(np.concatenate(drawn))
    tied = (frame["weight"].to_numpy()[pairs] == 0.5).astype(int)
    rows = np.repeat(pairs, 1 + tied)
    rows[np.cumsum(1 + tied) - 1] += tied  # the other order stands behind
    return rows


def prompt_rows(frame: pd.DataFrame, rows: np.ndarray) -> np.ndarray:
    """Of some stored rows, in their order, the first of every query whose chosen response is not labelled unsafe."""
    safe = rows[frame["chosen_safe"].iloc[rows].ne(False)]
    return safe[~frame["query_key"].iloc[safe].duplicated()]


def padded(rows: list[list[int]], width: int, pad_id: int, side: Literal["left", "right"]) -> np.ndarray:
    """Token lists -> (len(rows), width)."""
    found = np.full((len(rows), width), pad_id)
    for i, row in enumerate(rows):
        found[i, slice(width - len(row), None) if side == "left" else slice(len(row))] = row
    return found


def written_columns(batch: dict, names: list[str], pad_id: int, args: Args) -> dict:
    """Stored columns of some pairs -> those that are written, padded as by tldr_dataset.py (Detail 5)."""
    same = ("id", "tag", "choice", "chosen_policy", "rejected_policy", "policies", "margin", "weight", "turns")
    columns = {name: batch[name] for name in (*same, "chosen_safe", "rejected_safe", "query", "chosen", "rejected")}
    columns["source"] = columns["batch"] = [names[i] for i in batch["source"]]
    columns["split"] = [SPLITS[validation] for validation in batch["validation"]]
    columns["grade"] = [list(MARGINS)[i] for i in batch["grade"]]
    columns["extra"] = [{"confidence": confidence} for confidence in batch["confidence"]]
    columns["query_token"] = padded(batch["query_token"], args.max_query_length, pad_id, "left")
    columns["query_token_len"] = [len(tokens) for tokens in batch["query_token"]]
    for side in ("chosen", "rejected"):
        # as in tldr_dataset.py: a CNN/DM query loses the newline at its end
        columns[f"query_{side}"] = [a.strip() + b for a, b in zip(batch["query"], batch[side], strict=True)]
        joined = batch[f"query_{side}_token"]
        label = [mask_query(a, b, pad_id) for a, b in zip(batch["query_token"], joined, strict=True)]
        width = args.max_query_length + args.max_response_length
        columns[f"{side}_token"] = padded(batch[f"{side}_token"], args.max_response_length, pad_id, "right")
        columns[f"{side}_token_len"] = [len(tokens) for tokens in batch[f"{side}_token"]]
        columns[f"query_{side}_token"] = padded(joined, width, pad_id, "right")
        columns[f"query_{side}_token_len"] = [len(tokens) for tokens in joined]
        columns[f"query_{side}_token_response_label"] = padded(label, width, pad_id, "right")
    return columns


def written_features() -> Features:
    """Names and types of the columns that are written."""
    text, number, tokens = Value("string"), Value("int64"), List(Value("int64"))
    features = dict.fromkeys(("id", "source", "tag", "batch", "split", "grade"), text)
    features |= {"margin": Value("float64"), "weight": Value("float64"), "turns": number}
    features |= {"chosen_safe": Value("bool"), "rejected_safe": Value("bool")}
    features |= {"choice": Value("int32"), "extra": {"confidence": Value("int32")}}
    features |= dict.fromkeys(("chosen_policy", "rejected_policy", "policies"), text)
    for name in ("query", "chosen", "query_chosen", "rejected", "query_rejected"):
        features |= {name: text, f"{name}_token": tokens, f"{name}_token_len": number}
    for side in ("chosen", "rejected"):
        features[f"query_{side}_token_response_label"] = tokens
    return Features(features)


def as_reference(columns: dict) -> dict:
    """SFT_COLUMNS of what is written, or of its types, with chosen as reference_response."""
    return {name.replace("chosen", "reference_response"): columns[name] for name in SFT_COLUMNS}


# ---- statistics ------------------------------------------------------------------------------------------

TABLE_6_NOTE = """
Over all pairs that were kept, of train and validation, before --mix. Tokens are those of the texts: tokens of turns and
EOS are not counted, so that in a source of single turns an example has the tokens of its prompt and its response.

- Comparisons: pairs; a tie kept in both orders is one.
- Turns per dialogue: turns of the user, each with the answer to it; the compared response answers the last.
- Tokens per example: all turns that are left of the dialogue, and the response; a pair has two examples.
- Tokens in prompt: the last turn of the user (a post: the whole query). In the paper's rows of dialogues, too, prompt
  and response are far less than an example.
- Tokens in response: mean over chosen and rejected.
- Total: the sum of the comparisons, and means over all pairs. The paper's total (2,919,326) is not the sum of its rows
  (2,920,903), and its averages are not their mean, weighted or not (turns: 1.6, weighted 2.5, unweighted 1.9).
"""


def table_6(frame: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Table 6 of the stored pairs, a row per source and the total; TABLE_6_NOTE defines the columns."""
    frame, records = frame[~frame["second"]], []
    for name, group in [*((name, frame[frame["source"] == i]) for i, name in enumerate(names)), ("Total", frame)]:
        response = group["response_tokens"] / 2
        means = {
            "Avg. # Turns per Dialogue": group["turns"],
            "Avg. # Tokens per Example": group["context_tokens"] + response,
            "Avg. # Tokens in Prompt": group["prompt_tokens"],
            "Avg. # Tokens in Response": response,
        }
        record = {"Dataset": name, "Num. of Comparisons": len(group)}
        records.append(record | {column: f"{values.mean():.1f}" for column, values in means.items()})
    return pd.DataFrame(records)


def load_base(path: str, turns: bool) -> tuple:
    """(model, tokenizer) of --base. If `turns` are needed and missing, the tokenizer gets a token for each and the
    model embeddings for them; else the model is None. They are no special tokens, because decoding should keep them."""
    folder, model = checkpoint_folder("--base", path), None
    with or_fail(f"--base {path} cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if turns and not set(TURNS) <= set(tokenizer.get_vocab()):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    if tokenizer.eos_token is None:
        fail(f"--base {path}: its tokenizer has no EOS token, which ends every turn and response")
    if model is not None:
        tokenizer.add_tokens([AddedToken(turn, normalized=False) for turn in TURNS])
        if model.get_input_embeddings().num_embeddings < len(tokenizer) + 1:  # and [PAD], which the stages add
            torch.manual_seed(1)
            model.resize_token_embeddings(len(tokenizer) + 1, pad_to_multiple_of=64, mean_resizing=False)
    return model, tokenizer


def main(args: Args):
    # ---- input -----------------------------------------------------------------------------------------
    output_dir = Path(args.output_dir).expanduser()
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        fail(f"{output_dir} already holds data: remove it, or choose another --output-dir")
    if not 0 <= args.validation_share < 1 or args.max_query_length < 1 or args.max_response_length < 1:
        fail("--validation-share is from 0 to below 1, --max-query-length and --max-response-length are at least 1")
    if args.train_pairs is not None and not args.mix:
        fail("--train-pairs needs --mix; without it, train has all pairs")
    sources = [parse_source(text) for text in args.sources]
    counts = {source["name"]: Counter() for source in sources}
    names = list(counts)
    shares = parse_mix(args.mix, names)
    model, tokenizer = load_base(args.base, any(source["reader"] != "tldr" for source in sources))

    with unfinished_folder(output_dir) as folder:
        finished = folder / "finished"
        cache = folder / "cache"
        statistics = finished / "statistics"
        statistics.mkdir(parents=True)
        if model is not None:
            model.save_pretrained(finished / "base")
            tokenizer.save_pretrained(finished / "base")
            model = None
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # Detail 3, as the stages do: after the turns
        pad_id = tokenizer.pad_token_id

        # ---- read, tokenise, split ------------------------------------------------------------------------
        features = stored_features()

        def generate():
            for columns in stored_pairs(sources, tokenizer, args, counts):
                yield {column: columns.get(column) for column in features}
            if not any(count[split] for count in counts.values() for split in SPLITS):
                left_out = ", ".join(f"{name}: {dict(count)}" for name, count in counts.items())
                fail(f"not one pair is in train or validation; what became of the rows: {left_out}")

        # the fingerprint names a file in a fresh folder: it need not depend on the content, and nothing can be stale
        settings = {"cache_dir": str(cache), "fingerprint": "stored", "features": features}
        stored = Dataset.from_generator(generate, **settings)
        figures = ["source", "grade", "validation", "second", "weight", "turns", "query_key", "chosen_safe"]
        figures += ["rejected_safe", "context_tokens", "prompt_tokens", "response_tokens"]
        frame = stored.select_columns(figures).to_pandas()

        # ---- mix and write ----------------------------------------------------------------------------------
        available = {name: counts[name]["train"] for name in names}
        take = mix_counts(shares, available, args.train_pairs) if shares else {}
        rows = {"train": mixed_rows(frame, names, take, args.seed), "validation": np.flatnonzero(frame["validation"])}
        for split in SPLITS:
            if not len(rows[split]):
                fail(f"not one pair is in {split}: more rows, another --validation-share, or a source for {split}")
        posts = {split: prompt_rows(frame, rows[split]) for split in SPLITS}
        for name, chosen in (("preference", rows), ("sft", posts)):
            features, written = written_features(), DatasetDict()
            for split in [split for split in SPLITS if len(chosen[split])]:

                def write(batch: dict, name=name) -> dict:
                    columns = written_columns(batch, names, pad_id, args)
                    return as_reference(columns) if name == "sft" else columns

                written[split] = stored.select(chosen[split]).map(
                    write,
                    batched=True,
                    batch_size=BATCH,
                    writer_batch_size=BATCH,
                    remove_columns=stored.column_names,
                    features=Features(as_reference(features)) if name == "sft" else features,
                    cache_file_name=str(cache / f"{name}_{split}.arrow"),
                    new_fingerprint=f"{name}_{split}",
                    desc=f"{name}, {split}",
                )
            written.save_to_disk(finished / name)

        # ---- statistics ------------------------------------------------------------------------------------
        fates = ["rows", "bad rows", "ties", "unsafe chosen", "duplicates", "prompt too long", "response too long"]
        fates += ["prompt in validation", "train", "validation", "ties halved", "shortened"]
        table = pd.DataFrame([{"source": name} | {fate: counts[name][fate] for fate in fates} for name in names])
        table["mixed"] = [take.get(name, available[name]) for name in names]
        table["share"] = [f"{mixed / table['mixed'].sum():.4f}" for mixed in table["mixed"]]
        grades = pd.crosstab(frame["source"], frame["grade"], frame["weight"], aggfunc="sum")
        grades = grades.reindex(index=range(len(names)), columns=range(len(MARGINS)), fill_value=0).fillna(0)
        grades = grades.astype(int).set_axis(list(MARGINS), axis=1).rename_axis(None, axis=1)
        grades.insert(0, "source", names)
        bins = zip(frame["chosen_safe"], frame["rejected_safe"], strict=True)
        bins = pd.Series([SAFETY.get(labels, "not labelled") for labels in bins], name="bin")
        safety = pd.crosstab(frame["source"][~frame["second"]], bins[~frame["second"]])
        safety = safety.reindex(index=range(len(names)), columns=[*SAFETY.values(), "not labelled"], fill_value=0)
        safety = safety.rename_axis(None, axis=1)
        safety.insert(0, "source", names)
        sixth = table_6(frame, names)
        (statistics / "table_6.md").write_text(markdown(sixth.to_dict("records")) + TABLE_6_NOTE, encoding="utf-8")
        tables = {"table_6": sixth, "counts": table, "grades": grades, "safety": safety}
        for name, data in tables.items():
            data.to_csv(statistics / f"{name}.csv", index=False)
            print(f"\n{name}.csv\n{data.to_string(index=False)}")
    print(f"wrote {', '.join(str(folder) for folder in sorted(output_dir.iterdir()))}")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
