"""Turn preference sets of many kinds into one pre-tokenised mixture with graded margins (Llama 2, section 3.2).

    python llama2/preference_dataset.py --base EleutherAI/pythia-1.4b --output-dir data/llama2 --bad-rows skip \
        --sources helpful=hh:raw/hh/helpful-base harmless=hh:raw/hh/harmless-base:safety --mix helpful=1/4 harmless=0.75

Your own pairs, with prompt, chosen and rejected as texts or as lists of messages (the forms of TRL and UltraFeedback):

    python llama2/preference_dataset.py --base EleutherAI/pythia-1b-deduped --sources mine=pairs:pairs.jsonl

A source is name=reader:path[:train|:validation][:helpfulness|:safety]. Its path is a file or a folder of files, on disk
or in a data set on the Hub (OWNER/NAME[@revision][/FOLDER or FILE]): JSON Lines or a JSON array, gzipped or not, or
Parquet. Each reader knows the columns of one published set and turns its scale into the grades of Llama 2. README.md
lists the readers, their rules and the rows that are left out.

A dialogue becomes <|prompter|>TEXT<|endoftext|><|assistant|>TEXT<|endoftext|>… A system message stands at the start of
the first turn, before an empty line. If --base lacks the two turn tokens, OUTPUT_DIR/base is a copy that has them, with
this format as its chat template; use it for all later stages. A prompt and responses that are plain texts are taken as
they are, and posts (tldr) have the format of tldr_dataset.py. Dialogues longer than --max-query-length lose their
oldest exchanges, and posts lose their end (Detail 2).

This writes OUTPUT_DIR/preference, OUTPUT_DIR/sft and OUTPUT_DIR/statistics, which README.md describes.
"""

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
from datasets import Dataset, DatasetDict, Features, Value
from huggingface_hub import snapshot_download
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "eval")]

from eval_helpers import at_least, fail, files_below, one_line, or_fail, save_checkpoint  # noqa: E402

import tldr_dataset  # noqa: E402
from ppo import local_checkpoint  # noqa: E402

TURNS = ("<|prompter|>", "<|assistant|>")
# what dialogue_columns makes of messages, for tokenizer.apply_chat_template
CHAT_TEMPLATE = """{% if messages[0].role == "system" %}{% set system = messages[0].content + "\n\n" %}\
{% set messages = messages[1:] %}{% else %}{% set system = "" %}{% endif %}\
{% for message in messages %}{{ "<|prompter|>" if message.role == "user" else "<|assistant|>" }}\
{{ system if loop.first else "" }}{{ message.content + eos_token }}{% endfor %}\
{{ "<|assistant|>" if add_generation_prompt else "" }}"""
MARGINS = {"significantly": 1.0, "better": 2 / 3, "slightly": 1 / 3, "negligibly": 0.0, "none": 0.0}  # table 27, small
OPTIONAL = ("chosen_safe", "rejected_safe", "choice", "policies", "chosen_policy", "rejected_policy")
FATES = ["rows", "bad rows", "ties", "unsafe chosen", "duplicates", "prompt too long", "response too long"]
FATES += ["prompt in validation", "train", "validation", "ties halved", "shortened"]


@dataclass
class Args:
    sources: tuple[str, ...]
    """name=reader:path[:train|:validation][:helpfulness|:safety], any number; names may repeat"""
    base: str = "EleutherAI/pythia-1.4b"
    """model to train later: a Hub id[@revision], checkpoint folder or run folder"""
    output_dir: str = "data/llama2"
    """folder to write, which must be empty or absent"""
    mix: tuple[str, ...] = ()
    """name=share of every source in train, such as shp=0.25 or shp=1/4; they add up to 1. Default: all pairs"""
    validation_share: float = 0.05
    """share of the prompts in validation, for sources without a split"""
    ties: Literal["drop", "half"] = "drop"
    """leave ties out, or turn those of train into two pairs, one in each order, of weight 0.5"""
    bad_rows: Literal["error", "skip"] = "error"
    """end the run at a bad row, or leave it out and count it"""
    max_query_length: int = 1024
    """maximum tokens of the dialogue or post before the response"""
    max_response_length: int = 512
    """maximum tokens of a response, EOS included"""
    seed: int = 1
    """seed of the split, the mixture and the order"""


# ---- input ---------------------------------------------------------------------------------------


def parse_source(text: str) -> dict:
    """Return name, reader, files, split and tag of a value of --sources; split and tag are None if not given."""
    pattern = r"(?P<name>[\w.-]+)=(?P<reader>\w+):(?P<path>.+?)(:(?P<split>train|validation))?"
    match = re.fullmatch(pattern + "(:(?P<tag>helpfulness|safety))?", text)
    if not match or match["reader"] not in READERS:
        fail(f"--sources {text}: write name=reader:path[:split][:tag]; the readers are {', '.join(READERS)}")
    path = Path(match["path"]).expanduser()
    endings = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")
    if not path.exists() and (hub := re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+))?", match["path"])):
        repository, revision, inside = hub.groups()
        with or_fail(f"--sources {text}: no such file or folder, and no data set on the Hub"):
            wanted = {"repo_type": "dataset", "revision": revision, "allow_patterns": inside and f"{inside}*"}
            path = Path(snapshot_download(repository, **wanted), inside or "")
    files = [file for file in (files_below(path, "**") if path.is_dir() else [path]) if file.name.endswith(endings)]
    if not files or not files[0].is_file():
        fail(f"--sources {text}: {path} is no file and has no files that end in {', '.join(endings)}")
    return {"files": files} | match.groupdict()


def parse_mix(mix: tuple[str, ...], names: list[str]) -> dict[str, Fraction]:
    """Return {name: share} of --mix in the order of names, or {} without it."""
    with or_fail(f"--mix {' '.join(mix)}: write name=share, such as {names[0]}=1/4, once for every source"):
        shares = {name: Fraction(share) for name, share in (text.split("=") for text in mix)}
        is_whole = sorted(shares) == sorted(names) and sum(shares.values()) == 1 and min(shares.values()) > 0
        require(not mix or is_whole, f"shares above 0 of {', '.join(names)} should add up to 1")
    return {name: shares[name] for name in names if mix}


def load_base(path: str, turns: bool) -> tuple:
    """Return (model, tokenizer) of --base. If `turns` are needed and missing, both get them; otherwise model is None.
    The turns are not special tokens, because decoding should keep them."""
    folder, model = local_checkpoint("--base", path), None
    with or_fail(f"--base {path} cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if turns and not set(TURNS) <= set(tokenizer.get_vocab()):
            settings = {"dtype": torch.float32, "trust_remote_code": False, "output_loading_info": True}
            model, report = AutoModelForCausalLM.from_pretrained(folder, **settings)
            require(not report["missing_keys"], f"{sorted(report['missing_keys'])[:3]} are not among its weights")
    if tokenizer.eos_token is None:
        fail(f"--base {path}: its tokenizer has no EOS token, which ends every turn and response")
    if model is not None:
        tokenizer.add_tokens([AddedToken(turn, normalized=False) for turn in TURNS])
        tokenizer.chat_template = CHAT_TEMPLATE
        rows = model.get_input_embeddings().num_embeddings
        if rows < len(tokenizer) + 1:  # and [PAD], which the stages add
            model.resize_token_embeddings(len(tokenizer) + 1, pad_to_multiple_of=64, mean_resizing=False)
            for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
                for weight in layer.parameters():  # else a logit near 0, which may beat all real ones
                    weight.data[rows:] = weight.data[:rows].mean(0)
    return model, tokenizer


def stream_rows(path: Path) -> Iterator[object]:
    """Yield the rows of a file; those of JSON Lines as their text. Only a JSON array is loaded as a whole."""
    with or_fail(f"{path} cannot be read"):
        if path.suffix == ".parquet":
            for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=500):
                yield from batch.to_pylist()
            return
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            is_array = path.name.endswith((".json", ".json.gz")) and file.read(64).lstrip().startswith("[")
            file.seek(0)
            yield from json.load(file) if is_array else (line for line in file if line.strip())


# ---- readers -------------------------------------------------------------------------------------
# Each turns a row into chosen and rejected (texts), messages (the dialogue before them), prompt (a plain text) or post
# (for format_query), and grade (a key of MARGINS, or "tie"). Optional: margin, confidence and the columns in OPTIONAL.
# A bad row raises an exception, here or in check_pair.


def require(condition: bool, message: str):
    """Raise a ValueError unless the condition is met."""
    if not condition:
        raise ValueError(message)


def number_field(record: dict, field: str, low: float, high: float) -> float:
    """Return record[field], a number from low to high or a text that spells one, as in stack_exchange."""
    value = record[field]
    parsed = math.nan if isinstance(value, bool) else float(value)
    require(low <= parsed <= high, f"{field} should be a number from {low:g} to {high:g}, not {value!r:.80}")
    return parsed


def grade_of(gap: float) -> str:
    """Return the grade of a gap: a tie at 0, slightly from 1, better from 2, significantly from 3."""
    return ("negligibly", "slightly", "better", "significantly")[min(int(gap), 3)] if gap else "tie"


def dialogue(*texts: str) -> list[dict]:
    """Return the messages of a dialogue that the user begins."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def without_system(messages: list[dict]) -> list[dict]:
    """Return messages whose first turn begins with the system message, if there is one, and an empty line."""
    if messages[0].get("role") != "system":
        return messages
    system, first, *others = messages
    return [first | {"content": f"{system['content']}\n\n{first['content']}"}, *others]


def by_choice(messages: list[dict], texts: list[str], choice: int, grade: str) -> dict:
    """Return the pair of two texts, of which texts[choice] is preferred."""
    sides = {"chosen": texts[choice], "rejected": texts[1 - choice]}
    return {"messages": messages, "choice": choice, "grade": grade} | sides


def by_last_turn(chosen: list[dict], rejected: list[dict], grade: str) -> dict:
    """Return the pair of two dialogues that differ only in their last turn."""
    require(chosen[:-1] == rejected[:-1], "chosen and rejected are not the same dialogue up to their last turn")
    require(chosen[-1]["role"] == rejected[-1]["role"] == "assistant", "the last turn should be of the assistant")
    sides = {"chosen": chosen[-1]["content"], "rejected": rejected[-1]["content"]}
    return {"messages": chosen[:-1], "grade": grade} | sides


def read_hh(row: dict) -> dict:
    sides = []
    for field in ("chosen", "rejected"):
        head, *turns = re.split(r"\n\n(Human|Assistant):", row[field])
        require(turns and not head.strip(), f"{field} does not begin with a turn, 'Human:' after an empty line")
        roles = [{"Human": "user", "Assistant": "assistant"}[name] for name in turns[::2]]
        sides.append([{"role": role, "content": text.strip()} for role, text in zip(roles, turns[1::2], strict=True)])
    return by_last_turn(*sides, "none")


def read_tldr(row: dict) -> dict:
    fields = tldr_dataset.pair_fields(row)
    confidence = fields["extra"]["confidence"]
    require(confidence in (*range(1, 10), None), f"extra.confidence should be from 1 to 9, not {confidence!r:.80}")
    grade = "none" if confidence is None else list(MARGINS)[min(4 - abs(confidence - 5), 3)]
    choice, summaries = fields["choice"], fields["summaries"]
    pair = {"post": fields["info"], "choice": choice, "grade": grade, "confidence": confidence}
    for side, summary in (("chosen", summaries[choice]), ("rejected", summaries[1 - choice])):
        pair |= {side: summary["text"], f"{side}_policy": summary["policy"]}
    return pair | {"policies": "--".join(sorted(summary["policy"] or "null" for summary in summaries))}


def read_webgpt(row: dict | list) -> dict:
    if isinstance(row, list):  # comparisons.jsonl has two records in a row, the Hub one
        require(row[0]["question"] == row[1]["question"], "the two records are of different questions")
        row = row[0] | {f"{name}_{i}": row[i][name] for i in range(2) for name in ("answer", "score")}
    score = number_field(row, "score_0", -1, 1)
    require(number_field(row, "score_1", -1, 1) == -score, f"score_0 and score_1 should add up to 0 ({score})")
    texts = [row["answer_0"], row["answer_1"]]
    return by_choice(dialogue(row["question"]["full_text"]), texts, int(score < 0), grade_of(4 * abs(score)))


def read_stack_exchange(row: dict) -> dict:
    answers = row["answers"]
    scores = [number_field(answer, "pm_score", -1, 1000) for answer in answers]
    gap = max(scores) - min(scores)
    best = answers[scores.index(max(scores))]
    worst = answers[scores.index(min(scores)) if gap else 1]  # if all scores are equal: a tie of the first two
    sides = {"chosen": best["text"], "rejected": worst["text"]}
    return {"messages": dialogue(row["question"]), "grade": grade_of(gap)} | sides


def read_shp(row: dict) -> dict:
    choice = 1 - int(row["labels"])  # labels: 1 if A is preferred
    scores = [max(number_field(row, field, -1e9, 1e9), 1) for field in ("score_A", "score_B")]
    doublings = math.log2(scores[choice] / scores[1 - choice])
    require(doublings >= 0, f"labels is {row['labels']}, but {'AB'[choice]} has the lower score")
    texts = [row["human_ref_A"], row["human_ref_B"]]
    return by_choice(dialogue(row["history"]), texts, choice, grade_of(doublings))


def read_helpsteer2(row: dict) -> dict:
    # the turns of a longer prompt are separated by lines <extra_id_1>Assistant and <extra_id_1>User
    turns = re.split(r"\n*<extra_id_1>(?:User|Assistant)\n", row["prompt"])
    strength = number_field(row, "preference_strength", -3, 3)  # above 0: response_2 is better
    texts = [row["response_1"], row["response_2"]]
    return by_choice(dialogue(*turns), texts, int(strength > 0), grade_of(abs(strength)))


def read_strength(row: dict) -> dict:
    strength = number_field(row, "preference_strength", 0, 3)
    return by_last_turn(row["chosen"], row["rejected"], grade_of(strength))


def read_five_levels(row: dict) -> dict:
    levels = {"a-is-better": (0, "better"), "a-is-slightly-better": (0, "slightly"), "tie": (0, "tie")}
    levels |= {"b-is-better": (1, "better"), "b-is-slightly-better": (1, "slightly")}
    return by_choice(dialogue(row["prompt"]), [row["completion_a"], row["completion_b"]], *levels[row["preference"]])


def read_gptj(row: dict) -> dict:
    return read_pairs(row | {"messages": dialogue(row["prompt"])})


def read_pairs(row: dict) -> dict:
    prompt, before, pair = row.get("messages") or row.get("prompt"), {}, {"grade": "none"}
    for side in ("chosen", "rejected"):  # a text, the last message, or the whole dialogue
        turns = row[side] if isinstance(row[side], list) else [{"role": "assistant", "content": row[side]}]
        *before[side], answer = ({name: turn[name] for name in ("role", "content")} for turn in turns)
        require(answer["role"] == "assistant", f"{side} should end with a message of the assistant")
        pair[side] = answer["content"]
    require(before["chosen"] == before["rejected"], "chosen and rejected do not begin with the same messages")
    if isinstance(prompt, str) and (row.get("system") or isinstance(row["chosen"], list)):
        prompt = dialogue(prompt)
    messages = before["chosen"] or prompt
    require(messages is not None, "there is neither a prompt nor messages")
    if isinstance(messages, str):
        pair["prompt"] = messages
    else:
        system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        messages = [{name: message.get(name) for name in ("role", "content")} for message in messages]
        pair["messages"] = without_system([*system, *messages])
    rating = row.get("rating")
    if isinstance(rating, str):
        pair["grade"] = rating.lower().removesuffix(" / unsure").removesuffix(" better")
        require(pair["grade"] in (*MARGINS, "tie"), f"rating {rating!r:.80} is not one of {', '.join(MARGINS)}, tie")
    elif rating is not None:
        pair["margin"] = number_field(row, "rating", 0, 1e6)
    for field in ("chosen_safe", "rejected_safe"):
        pair[field] = row.get(field)
        require(isinstance(pair[field], bool | None), f"{field} should be true, false or null, not {pair[field]!r:.80}")
    return pair


READERS = {"hh": read_hh, "tldr": read_tldr, "webgpt": read_webgpt, "stack_exchange": read_stack_exchange}
READERS |= {"shp": read_shp, "gptj": read_gptj, "helpsteer2": read_helpsteer2, "strength": read_strength}
READERS |= {"five_levels": read_five_levels, "pairs": read_pairs}


def check_pair(pair: dict):
    """Raise a ValueError unless both responses are texts that differ, and the dialogue is texts of user and assistant
    alternately and ends with the user."""
    texts = [tldr_dataset.text_field(pair, side, side) for side in ("chosen", "rejected")]
    require(texts[0].strip() != texts[1].strip(), "chosen and rejected are equal")
    if "post" in pair:
        return
    if "prompt" in pair:
        tldr_dataset.text_field(pair, "prompt", "prompt")
        return
    for i, message in enumerate(pair["messages"]):
        role = ("user", "assistant")[i % 2]
        texts.append(tldr_dataset.text_field(message, "content", f"turn {i + 1}"))
        require(message.get("role") == role, f"turn {i + 1} should be of {role}, not of {message.get('role')!r:.80}")
    require(len(pair["messages"]) % 2 == 1, "the last turn of messages should be of the user")
    for turn in TURNS:
        require(not any(turn in text for text in texts), f"a text holds {turn}, which would begin a turn")


# ---- from a row to its columns -------------------------------------------------------------------


class LeftOut(Exception):
    """Raised for a row that is not kept. Its text is the reason, a column of counts.csv."""


def read_pair(where: str, row: object, source: dict, args: Args) -> dict:
    """Return the pair of a raw row. Raises LeftOut, or ends the run at a bad row unless --bad-rows skip."""
    try:
        pair = READERS[source["reader"]](json.loads(row) if isinstance(row, str) else row)
        if pair["grade"] == "tie" and args.ties == "drop":
            raise LeftOut("ties")
        check_pair(pair)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if args.bad_rows == "error":
            fail(f"{where}: the reader {source['reader']} cannot use it ({one_line(error)}); see --bad-rows skip")
        raise LeftOut("bad rows") from error
    safe = (pair.get("chosen_safe"), pair.get("rejected_safe"))
    if safe == (False, True) or (pair["grade"] == "tie" and safe == (True, False)):  # section 3.2.1
        raise LeftOut("unsafe chosen")
    return pair


def begins_with_dialogue(source: dict) -> bool:
    """Return whether the first row of a source is a dialogue, or bad, and not a post or a plain text."""
    try:
        row = next(stream_rows(source["files"][0]))
        return "messages" in READERS[source["reader"]](json.loads(row) if isinstance(row, str) else row)
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError):
        return source["reader"] != "tldr"


def digest(*parts: object) -> bytes:
    """Return a hash of 16 bytes of the parts."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).digest()


def dialogue_columns(pair: dict, tokenizer, args: Args) -> dict:
    """Return the columns of tldr_dataset.py for a dialogue, without its oldest exchanges if it is too long, and what
    statistics and split need. Raises LeftOut if its last turn alone is too long."""
    messages, eos, eos_id = pair["messages"], tokenizer.eos_token, tokenizer.eos_token_id
    if not set(TURNS) <= set(tokenizer.get_vocab()):
        fail("--sources: a dialogue, although the first row of each source is a plain text; put the dialogues first")
    turn_ids = tokenizer.convert_tokens_to_ids(list(TURNS))
    turns = tldr_dataset.encode(tokenizer, [message["content"] for message in messages])
    first = 0
    while sum(len(turn) + 2 for turn in turns[first:]) + 1 > args.max_query_length:  # + 2: the turn token and EOS
        first += 2
        if first >= len(turns):
            raise LeftOut("prompt too long")
    text, query = "", []
    for i in range(first, len(turns)):
        text += f"{TURNS[i % 2]}{messages[i]['content']}{eos}"
        query += [turn_ids[i % 2], *turns[i], eos_id]
    text += TURNS[1]
    query.append(turn_ids[1])
    columns = query_and_responses(text, query, pair, tokenizer, args)
    columns |= {"first_turns": {messages[0]["content"], messages[first]["content"]}, "shortened": first > 0}
    columns |= {"turns": (len(turns) - first + 1) // 2, "prompt_tokens": len(turns[-1])}
    return columns | {"context_tokens": sum(len(turn) for turn in turns[first:])}


def plain_columns(pair: dict, tokenizer, args: Args) -> dict:
    """Return the same columns for a plain prompt, which is followed by the response as it is."""
    query = tldr_dataset.encode(tokenizer, pair["prompt"])
    if len(query) > args.max_query_length:
        raise LeftOut("prompt too long")
    columns = query_and_responses(pair["prompt"], query, pair, tokenizer, args)
    columns |= {"first_turns": {pair["prompt"]}, "shortened": False, "turns": 1}
    return columns | {"prompt_tokens": len(query), "context_tokens": len(query)}


def query_and_responses(text: str, query: list[int], pair: dict, tokenizer, args: Args) -> dict:
    """Return the columns of tldr_dataset.py for a query (its text and tokens) and both responses, each tokenised alone,
    as a policy samples them."""
    padding = [tokenizer.pad_token_id] * (args.max_query_length - len(query))
    columns = {"query": text, "query_token": padding + query, "query_token_len": len(query)}
    widths = (args.max_query_length, args.max_response_length, args.max_query_length + args.max_response_length)
    for side in ("chosen", "rejected"):
        response = pair[side] + tokenizer.eos_token
        tokens = [*tldr_dataset.encode(tokenizer, pair[side]), tokenizer.eos_token_id]
        texts = response, text + response
        columns |= tldr_dataset.padded_columns(side, texts, query, tokens, tokenizer.pad_token_id, widths)
    return columns


def post_columns(pair: dict, tokenizer, args: Args) -> dict:
    """Return the same columns for a post or an article, by the functions of tldr_dataset.py (Details 2 to 5)."""
    try:
        columns = tldr_dataset.query_columns(pair["post"], tokenizer, args.max_query_length)
    except ValueError as error:  # too long even without its post
        raise LeftOut("prompt too long") from error
    text, length = columns["query"], columns["query_token_len"]
    widths = (args.max_query_length, args.max_response_length, args.max_query_length + args.max_response_length)
    columns |= {"first_turns": {text}, "shortened": text != tldr_dataset.format_query(pair["post"])}
    columns |= {"turns": 1, "prompt_tokens": length, "context_tokens": length}
    for side in ("chosen", "rejected"):
        columns |= tldr_dataset.response_columns(side, pair[side], columns, tokenizer, widths)
    return columns


COLUMNS_OF = {"messages": dialogue_columns, "prompt": plain_columns, "post": post_columns}


def split_of(columns: dict, is_tie: bool, source: dict, held_out: set[bytes], args: Args) -> str:
    """Return the split of a pair, and add the hashes of its prompts to `held_out` if that is validation. Raises LeftOut
    for a prompt that must stay out of train, and for a tie in validation."""
    keys = {digest(args.seed, prompt.strip()) for prompt in columns["first_turns"]}
    below = args.validation_share * 2**64 if source["split"] is None else 0
    kept_out = [key in held_out or int.from_bytes(key[:8], "big") < below for key in keys]
    split = source["split"] or ("validation" if all(kept_out) else "train")
    if split == "train" and any(kept_out):
        raise LeftOut("prompt in validation")
    if split == "validation":
        if is_tie:
            raise LeftOut("ties")
        held_out |= keys
    return split


def other_order(columns: dict) -> dict:
    """Return the columns of a pair with chosen and rejected exchanged."""
    sides = {"chosen": "rejected", "rejected": "chosen"}
    swapped = {re.sub("chosen|rejected", lambda side: sides[side[0]], name): x for name, x in columns.items()}
    return swapped | {"choice": None if columns["choice"] is None else 1 - columns["choice"]}


def pair_columns(pair: dict, source: dict, seen: set[bytes], held_out: set[bytes], tokenizer, args: Args) -> dict:
    """Return all columns of a pair but its id. Raises LeftOut if it is not kept. `seen` has the hashes of all pairs so
    far, and `held_out` those of the prompts in validation."""
    kind = next(name for name in COLUMNS_OF if name in pair)
    prompt = tldr_dataset.format_query(pair["post"]) if kind == "post" else pair[kind]
    responses = [pair["chosen"], pair["rejected"]]
    is_tie = pair["grade"] == "tie"
    if is_tie:
        responses.sort()  # a tie in the other order is a duplicate, too
    key = digest(prompt, responses, pair["grade"], pair.get("margin"))
    if key in seen:
        raise LeftOut("duplicates")
    seen.add(key)
    columns = COLUMNS_OF[kind](pair, tokenizer, args)
    longest = args.max_query_length + args.max_response_length  # a post and a response may have more tokens joined
    for side in ("chosen", "rejected"):
        joined = columns[f"query_{side}_token_len"]
        if columns[f"{side}_token_len"] > args.max_response_length or joined > longest:
            raise LeftOut("response too long")
    columns["split"] = split_of(columns, is_tie, source, held_out, args)
    grade = "negligibly" if is_tie else pair["grade"]
    columns |= {"grade": grade, "margin": pair.get("margin", MARGINS[grade]), "weight": 0.5 if is_tie else 1.0}
    columns |= {"source": source["name"], "batch": source["name"], "tag": source["tag"]}
    columns |= {name: pair.get(name) for name in OPTIONAL} | {"extra": {"confidence": pair.get("confidence")}}
    columns["query_key"] = int.from_bytes(digest(columns["query"])[:8], "big", signed=True)
    return columns


def stored_pairs(sources: list[dict], tokenizer, args: Args, counts: dict[str, Counter]) -> Iterator[dict]:
    """Yield the columns of every pair that is kept, and count in counts[source] what becomes of each row."""
    seen, held_out = set(), set()
    # validation first and train last, because then every prompt in validation is known
    for source in sorted(sources, key=lambda source: ("validation", None, "train").index(source["split"])):
        count = counts[source["name"]]
        rows = ((f"{file}, row {i}", row) for file in source["files"] for i, row in enumerate(stream_rows(file), 1))
        for where, row in rows:
            count["rows"] += 1
            try:
                pair = read_pair(where, row, source, args)
                columns = pair_columns(pair, source, seen, held_out, tokenizer, args)
            except LeftOut as reason:
                count[str(reason)] += 1
                continue
            count[columns["split"]] += 1
            count["shortened"] += columns["shortened"]
            columns["id"] = f"{source['name']}_{count['rows']:07d}"
            yield columns
            if pair["grade"] == "tie":
                count["ties halved"] += 1
                yield other_order(columns)


# ---- mixture and statistics ----------------------------------------------------------------------


def mix_counts(shares: dict[str, Fraction], available: dict[str, int]) -> dict[str, int]:
    """Return the number of pairs to take from each source: the largest numbers with exactly these shares."""
    step = math.lcm(*(share.denominator for share in shares.values()))
    name = min(shares, key=lambda name: available[name] / shares[name])  # the first source to run out
    total = math.floor(available[name] / shares[name]) // step * step
    if not total:
        share = f"share of {float(shares[name]):g}, and exact shares need a multiple of {step:,} pairs"
        fail(f"--mix cannot be met: {name} has {available[name]:,} pairs in train for its {share}")
    return {name: int(share * total) for name, share in shares.items()}


def mixed_rows(frame: pd.DataFrame, take: dict[str, int], seed: int) -> np.ndarray:
    """Return the stored rows of train in random order: take[name] pairs drawn from each source. The two rows of a tie,
    which are stored one after the other, stay together."""
    drawn = []
    for i, name in enumerate(take):
        is_own = (frame["source"] == name) & (frame["split"] == "train") & ~frame["second"]
        drawn.append(np.random.default_rng([seed, i]).permutation(np.flatnonzero(is_own))[: take[name]])
    pairs = np.random.default_rng([seed, len(take)]).permutation(np.concatenate(drawn))
    is_tie = frame["weight"].to_numpy() == 0.5
    return np.array([row for pair in pairs for row in ([pair, pair + 1] if is_tie[pair] else [pair])], dtype=int)


def table_6(frame: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Return the paper's table 6: a row per source and the total, as README.md defines them. frame: a row per pair."""
    response = (frame["chosen_token_len"] + frame["rejected_token_len"]) / 2 - 1  # the mean of both, without EOS
    means = pd.DataFrame({"Avg. # Turns per Dialogue": frame["turns"]})
    means["Avg. # Tokens per Example"] = frame["context_tokens"] + response
    means["Avg. # Tokens in Prompt"] = frame["prompt_tokens"]
    means["Avg. # Tokens in Response"] = response
    table = means.groupby(frame["source"]).mean().reindex(names)
    table.loc["Total"] = means.mean()
    table = table.map("{:.1f}".format)
    table.insert(0, "Num. of Comparisons", [*((frame["source"] == name).sum() for name in names), len(frame)])
    return table.rename_axis("Dataset").reset_index()


def write_tables(frame: pd.DataFrame, counts: dict[str, Counter], mixed: dict[str, int], folder: Path):
    """Write and print table_6, counts and grades; mixed[name] pairs of each source are in train."""
    names = list(counts)
    table = pd.DataFrame([{"source": name} | {fate: counts[name][fate] for fate in FATES} for name in names])
    table["mixed"] = [mixed[name] for name in names]
    table["share"] = [f"{number / table['mixed'].sum():.4f}" for number in table["mixed"]]
    grades = pd.crosstab(frame["source"], frame["grade"], frame["weight"], aggfunc="sum")
    grades = grades.reindex(index=names, columns=list(MARGINS)).fillna(0).astype(int)
    grades = grades.rename_axis(index="source", columns=None).reset_index()
    for name, data in {"table_6": table_6(frame[~frame["second"]], names), "counts": table, "grades": grades}.items():
        data.to_csv(folder / f"{name}.csv", index=False)
        print(f"\n{name}.csv\n{data.to_string(index=False)}")


def main(args: Args):
    # ---- input -----------------------------------------------------------------------------------
    output_dir = Path(args.output_dir).expanduser()
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        fail(f"{output_dir} already holds data: remove it, or choose another --output-dir")
    at_least(1, args, "max_query_length", "max_response_length")
    if not 0 <= args.validation_share < 1:
        fail(f"--validation-share {args.validation_share}: from 0 to below 1")
    sources = [parse_source(text) for text in args.sources]
    counts = {source["name"]: Counter() for source in sources}
    shares = parse_mix(args.mix, list(counts))
    model, tokenizer = load_base(args.base, any(begins_with_dialogue(source) for source in sources))

    with tldr_dataset.unfinished_folder(output_dir) as folder:
        finished = folder / "finished"
        (finished / "statistics").mkdir(parents=True)
        if model is not None:
            save_checkpoint(model, tokenizer, finished / "base")
            model = None
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # Detail 3, after the turns, as the stages do

        # ---- read, tokenise, split ---------------------------------------------------------------
        types = tldr_dataset.column_types("preference")
        for name in ("info", "summaries", "worker"):
            del types[name]
        types |= dict.fromkeys(("source", "tag", "grade"), Value("string"))
        types |= {"margin": Value("float64"), "weight": Value("float64"), "turns": Value("int64")}
        types |= {"chosen_safe": Value("bool"), "rejected_safe": Value("bool")}
        written = list(types)
        figures = ["query_key", "context_tokens", "prompt_tokens"]  # for mixture and statistics only
        types |= dict.fromkeys(figures, Value("int64"))

        def generate():
            for columns in stored_pairs(sources, tokenizer, args, counts):
                yield {name: columns[name] for name in types}
            if not any(count[split] for count in counts.values() for split in ("train", "validation")):
                fail(f"no pair is left: {counts}")

        # the cache is new, so the fingerprint can be any name
        cache = {"cache_dir": str(folder / "cache"), "fingerprint": "stored"}
        stored = Dataset.from_generator(generate, features=Features(types), **cache)
        columns = ["id", "source", "grade", "split", "weight", "turns", "chosen_safe"]
        columns += [*figures, "chosen_token_len", "rejected_token_len"]
        frame = stored.select_columns(columns).to_pandas()
        frame["second"] = frame["id"].duplicated()  # the other order of a tie

        # ---- mix and write -----------------------------------------------------------------------
        available = {name: count["train"] for name, count in counts.items()}
        take = mix_counts(shares, available) if shares else available
        rows = {"train": mixed_rows(frame, take, args.seed), "validation": frame.index[frame["split"] == "validation"]}
        sft_names = [name for name in tldr_dataset.column_types("sft") if name not in tldr_dataset.SFT_COLUMNS]
        as_chosen = {name.replace("reference_response", "chosen"): name for name in sft_names}
        preference, sft = DatasetDict(), DatasetDict()
        for split in rows:
            if not len(rows[split]):
                fail(f"no pair is in {split}: add rows, change --validation-share, or give a source for {split}")
            preference[split] = stored.select_columns(written).select(rows[split])
            prompts = frame.iloc[rows[split]]
            prompts = prompts[prompts["chosen_safe"].ne(False)].drop_duplicates("query_key")
            if len(prompts):
                sft[split] = stored.select_columns(["id", "source", "tag", *as_chosen]).select(prompts.index)
        preference.save_to_disk(finished / "preference")
        sft.rename_columns(as_chosen).save_to_disk(finished / "sft")
        write_tables(frame, counts, take, finished / "statistics")
    print(f"wrote {', '.join(str(folder) for folder in sorted(output_dir.iterdir()))}")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # print ? where the terminal cannot show a character
    main(tyro.cli(Args))
