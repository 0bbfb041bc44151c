"""Check every row of a finished data set: would tldr_dataset.py have written it with this tokenizer?

    python eval/check_data.py data/tldr
    python eval/check_data.py me/tldr-sft --tokenizer EleutherAI/pythia-6.9b-deduped

Checks the widths, padding, EOS, ids, labels and texts of queries and responses. It reads data sets that tldr_dataset.py
or ensembles/ wrote, and the published ones. At the first split with a damaged row, it prints that row and ends with
exit code 1. In some rows of the published sets, `query` does not tokenise back to query_token. These are counted, but
not as damaged.
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from datasets import Dataset, Features, Value, load_dataset, load_from_disk
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tldr_dataset import encode, fail, or_fail  # noqa: E402

QUERY_DIFFERS = "query"  # the row is fine, except that `query` does not tokenise back to query_token


@dataclass
class Args:
    data: Annotated[str, tyro.conf.Positional]
    """folder of tldr_dataset.py, one data set in it, or a Hub id[@revision]"""
    tokenizer: str = "EleutherAI/pythia-1b-deduped"
    """tokenizer that the data were made with: a Hub id[@revision] or a folder"""
    num_proc: int = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    """processes that share the rows"""


def main(args: Args):
    name, revision = args.tokenizer, ""
    if not Path(name).exists():  # a path may hold an @
        name, _, revision = name.partition("@")
    with or_fail(f"--tokenizer {args.tokenizer} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main", trust_remote_code=False)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    folders = [str(Path(args.data, name)) for name in ("sft", "preference") if Path(args.data, name).is_dir()]
    for path in folders or [args.data]:
        name, _, revision = path.partition("@")
        with or_fail(f"{path}: no data set with the splits train and validation. Make it with tldr_dataset.py"):
            data = load_from_disk(path) if Path(path).exists() else load_dataset(name, revision=revision or None)
            splits = {split: data[split] for split in ("train", "validation", *data)}
        for split, rows in splits.items():
            check_split(path, split, rows, args, tokenizer)


def check_split(path: str, split: str, rows: Dataset, args: Args, tokenizer):
    """Look at every row of a split; ends where one is damaged, or where most of the queries do not tokenise back."""
    place = f"{path}: {split}"
    remedy = f"If another tokenizer than {args.tokenizer} made it, name that with --tokenizer; else make it again"
    is_pairs = any("chosen" in column for column in rows.column_names)
    needed = ["query", "query_token"]
    for response in ("chosen", "rejected") if is_pairs else ("reference_response",):
        for name in (response, f"query_{response}"):
            needed += [name, f"{name}_token", f"{name}_token_len"]
        needed.append(f"query_{response}_token_response_label")
    missing = [column for column in needed if column not in rows.column_names]
    if missing or len(rows) == 0:
        fail(f"{place} has {len(rows)} rows and lacks the columns {missing}. {remedy}")
    with or_fail(f"{place} cannot be read. {remedy}"), tempfile.TemporaryDirectory() as folder:
        widths = {column: len(rows[0][column] or []) for column in needed if column.endswith("_token")}
        function = partial(find_damage, tokenizer=tokenizer, widths=widths)
        settings = {"features": Features({"damage": Value("string")}), "remove_columns": rows.column_names}
        processes = min(args.num_proc, -(-len(rows) // 100))  # to start a process takes as long as 100 rows
        settings |= {"num_proc": processes if processes > 1 else None, "cache_file_name": f"{folder}/{split}.arrow"}
        damages = rows.map(function, new_fingerprint="damage", desc=f"{Path(path).name} {split}", **settings)["damage"][
            :
        ]
    damaged = [f"row {i}: {damage}" for i, damage in enumerate(damages) if damage not in ("", QUERY_DIFFERS)]
    if damaged:
        fail(f"{place}, {damaged[0]} ({len(damaged)} of {len(rows)} rows are damaged). {remedy}")
    differ = damages.count(QUERY_DIFFERS)
    report = f"in {differ} of {len(rows)} rows `query` does not tokenise back to query_token"
    if 2 * differ > len(rows):
        fail(f"{place}: {report}. {remedy}")
    print(f"{path} {split}: no damage; {report}")


def find_damage(row: dict, tokenizer, widths: dict[str, int]) -> dict:
    """Return {"damage": what is wrong with a row of a finished data set, "" if nothing}; QUERY_DIFFERS if nothing else
    is. widths: {column of tokens: its width in the first row}."""
    pad_id = tokenizer.pad_token_id
    query_ids = row["query_token"] or []
    query = query_ids[query_ids.count(pad_id) :]
    query_differs = False
    for column, width in widths.items():
        name = column.removesuffix("_token")
        ids = row[column] or []
        tokens = query if name == "query" else ids[: len(ids) - ids.count(pad_id)]
        damage = id_damage(column, ids, tokens, width, tokenizer)
        differs = not damage and not is_tokens_of(str(row[name]), tokens, name != "query", tokenizer)
        if differs and row[name] and f"query_{column}" in widths:  # its tokens are those behind the query
            joined = row[f"query_{column}"] or []
            joined = joined[: len(joined) - joined.count(pad_id)]
            differs = joined[-len(tokens) :] != tokens
        length = row.get(f"{column}_len", len(tokens))
        if name == "query":
            query_differs = differs
        elif differs:
            damage = f"{column} is not what the tokenizer makes of {name}"
        # the authors' query_token_len is that of their `query`
        if not damage and length != len(tokens) and not (name == "query" and query_differs):
            damage = f"{column}_len is {length}, not {len(tokens)}"
        if not damage and name.startswith("query_"):
            damage = joined_damage(row, name, query, ids, tokens, pad_id)
        if damage:
            return {"damage": damage}
    return {"damage": QUERY_DIFFERS if query_differs else ""}


def id_damage(column: str, ids: list, tokens: list, width: int, tokenizer) -> str:
    """Return what is wrong with ids that should be (width,); tokens: without as many ids as there are [PAD], on the
    side for it."""
    pad_id = tokenizer.pad_token_id
    largest = len(tokenizer) - 1
    wrong = [token for token in tokens if token is None or token == pad_id or not 0 <= token <= largest]
    padding = "on the left alone"
    ends = len(tokens) > 0
    if column != "query_token":
        padding = "on the right alone, EOS before"
        ends = tokens[-1:] == [tokenizer.eos_token_id]
    if len(ids) == width and not wrong and ends:
        return ""
    needed = f"{width} ids of 0 to {largest}, [PAD] ({pad_id}) {padding}"
    return f"{column} needs {needed}; it has {len(ids)}, wrong {wrong[:3]}, last {tokens[-1:]}"


def is_tokens_of(text: str, tokens: list[int], has_eos: bool, tokenizer) -> bool:
    """Return whether these are the tokens of a text, or decode to it. The latter have special tokens in them, or were
    sampled (alpaca_dataset.py and gold_label.py in ensembles/)."""
    end = [tokenizer.eos_token_id] if has_eos else []
    if encode(tokenizer, text.removesuffix(tokenizer.eos_token)) + end == tokens:
        return True
    return tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == text


def joined_damage(row: dict, name: str, query: list[int], ids: list[int], tokens: list[int], pad_id: int) -> str:
    """Return what is wrong with label and text of query + response. ids, tokens: with and without [PAD]."""
    column = f"{name}_token"
    response = name.removeprefix("query_")
    shared = len(os.path.commonprefix([query, tokens]))
    labels = [[pad_id] * hidden + ids[hidden:] for hidden in (shared, len(query))]  # ours, the authors'
    if f"{column}_response_label" in row:
        if row[f"{column}_response_label"] not in labels:
            return f"{column}_response_label is not {column} with [PAD] over the query"
        if str(row[name]) != str(row["query"]).strip() + row[response]:
            return f"{name} is not query and {response}"
    return ""


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
