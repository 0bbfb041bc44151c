"""Turn raw TL;DR posts and comparisons into pre-tokenised data sets, with length statistics and plots (Details 1-6).

    # paper scale: both published data sets, from the Hub
    python tldr_dataset.py --output-dir data/tldr
    # from local folders with train|validation|test|validation_cnndm.jsonl (or .parquet)
    python tldr_dataset.py --sft-dataset raw/posts --preference-dataset raw/comparisons --tokenizer raw/tokenizer
    # and publish the result
    python tldr_dataset.py --push-to-hub --hub-id-sft me/tldr-sft --hub-id-preference me/tldr-preference

This writes OUTPUT_DIR/sft and OUTPUT_DIR/preference (`datasets.load_from_disk`) and OUTPUT_DIR/statistics (CSV, PNG).
All cores share the rows (--num-proc), and the data sets are identical for any number of processes. The columns are
those of the published vwxyzjn/…_oai_preprocessing_1706381144 data sets. To check an existing data set for damage, use
eval/check_data.py.

The file starts with the algorithm: arguments, queries and responses, and main. Raw rows, all rows in parallel,
statistics and Hub follow.

Terms: a query is a post (or a CNN/DM article) in its template. A response is a summary with a leading space and EOS.
`X_token` holds the token ids of the text `X`, padded to a fixed width, and `X_token_len` counts them without [PAD].
`info` is the post of a raw pair. `where` names the file and row of a raw row in messages.

The script deviates from the paper and the authors' code on purpose:
- If rows are longer than their width, the run ends with an error that names the widths that all rows need. The authors'
  code silently cuts such rows, EOS included.
- A response's tokens are those that follow the query in the joined row. With Pythia's tokenizer they equal the tokens
  of the response alone, as in the authors' code. A tokenizer that puts a space before every text (Llama 2's) makes a
  difference.
- Nothing is added to a text. If the tokenizer would add a BOS, a line is printed that says that no row has it.
- The response label hides the tokens that query and query + response share, not the first `query_token_len` ones.
  CNN/DM queries end in a newline that is lost on joining, so counting would also hide a token of the response.
- Text that happens to spell `<|endoftext|>` or `[PAD]` is tokenised as plain text, so only our own EOS ends a response.
- `query` is the formatted text. The authors stored decode(query_token), and their tokenizer dropped the space before
  punctuation. `query_token` and the responses' tokens are the same in both. In 4.7 % of the
  rows, `query_…_token` and its label differ, because both scripts make them from the text of `query`.
- CNN/DM pairs are recognised by their article as well as by their batch.
- A missing subreddit becomes "" and a missing policy "null", and both are counted. The real pairs have both.
- `validation_cnndm` rows keep the order of the file, and ties in the policy tables are ordered by name.
"""

import bisect
import functools
import json
import os
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import datasets
import pandas as pd
import pyarrow.parquet
import tyro
from datasets import Dataset, DatasetDict, Features, List, Value, load_dataset, load_from_disk
from huggingface_hub import DatasetCard, HfApi, hf_hub_download
from matplotlib.figure import Figure
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase

TLDR_TEMPLATE = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"  # Detail 2: no trailing space
CNNDM_TEMPLATE = "Article:\n{article}\n\nTL;DR:\n"
CNNDM_BATCHES = ("batch0_cnndm", "cnndm0", "cnndm2")  # Detail 1
SFT_COLUMNS = ("id", "subreddit", "title", "post", "summary")  # Detail 1
PREFERENCE_COLUMNS = ("info", "summaries", "choice", "batch", "split", "extra")  # Detail 1
INFO_FIELDS = ("id", "post", "title", "subreddit", "site", "article")
MAX_QUERY_LENGTH_CNNDM = 1919  # 2047 - 128, as in OpenAI's code
MAX_RM_RESPONSE_LENGTH_CNNDM = 155  # Detail 4
# (width of query, width of response): width of both together, as the paper measured it (Detail 5)
MEASURED_WIDTHS = {(512, 53): 562, (512, 169): 638, (MAX_QUERY_LENGTH_CNNDM, MAX_RM_RESPONSE_LENGTH_CNNDM): 2021}
RESPONSES = {"sft": ("reference_response",), "preference": ("chosen", "rejected")}
SPLITS = {"sft": ("train", "validation", "test"), "preference": ("train", "validation", "test", "validation_cnndm")}
BETWEEN_WORDS = re.compile(r"(?<=\w)[ \n](?=\w)")
RawRows = list[tuple[str, dict]]  # [(where, row), …]

# No markup, because policies and titles are data. Wide enough for the tables if the output goes to a file.
console = Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 120)


@dataclass
class Args:
    sft_dataset: str = "vwxyzjn/summarize_from_feedback_tldr_3_filtered"
    """posts with reference summaries (Detail 1): a Hub id (`@revision` allowed) or a folder of jsonl/parquet files"""
    preference_dataset: str = "openai/summarize_from_feedback"
    """pairs of summaries with a choice (Detail 1): a Hub id (its config `comparisons`) or a folder"""
    tokenizer: str = "EleutherAI/pythia-1b-deduped"
    """tokenizer of the models to train: a Hub id (`@revision` allowed) or a folder; `[PAD]` is added (Detail 3)"""
    output_dir: str = "data/tldr"
    """folder to write, which must be empty or absent"""
    num_proc: int = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    """number of processes that share the rows; default: all available cores"""

    max_query_length: int = 512
    """maximum tokens of a TL;DR query: longer ones are truncated (Detail 2), shorter ones left-padded (Detail 5)"""
    max_sft_response_length: int = 53
    """maximum tokens of a reference summary, leading space and EOS included (Detail 4)"""
    max_rm_response_length: int = 169
    """maximum tokens of a compared summary, leading space and EOS included (Detail 4)"""

    push_to_hub: bool = False
    """also push both data sets to the Hub, each with a data card"""
    hub_id_sft: str = ""
    """Hub repository of the SFT data set, `owner/name`; required with --push-to-hub"""
    hub_id_preference: str = ""
    """Hub repository of the preference data set, `owner/name`; required with --push-to-hub"""
    hub_revision: str = "main"
    """branch of both repositories to push to; it is created if necessary"""


# ==== the algorithm ===============================================================================


def format_query(row: dict) -> str:
    """Return the query text of an SFT row or a pair's `info`, in CNN/DM's template if it has an article, else in
    TL;DR's."""
    if row.get("article") is not None:
        return CNNDM_TEMPLATE.format(article=row["article"])
    return TLDR_TEMPLATE.format(subreddit=row.get("subreddit") or "", title=row["title"], post=row["post"])


def truncate_query(row: dict, tokenizer: PreTrainedTokenizerBase, max_length: int) -> tuple[str, list[int]]:
    """Return (query text, its token ids) with at most max_length tokens (Detail 2).

    While the query is too long, its post (or CNN/DM article) is cut before its last newline or, if it has none left,
    loses its last character. Template and title stay whole. Raises ValueError if even an empty post does not fit."""
    field = "article" if row.get("article") is not None else "post"

    def query_of(body: str) -> tuple[str, list[int]]:
        query = format_query({**row, field: body})
        return query, encode(tokenizer, query)

    def too_long(cut: int) -> bool:
        return len(query_of(body[:cut])[1]) > max_length

    body = row[field]
    query, tokens = query_of(body)
    if len(tokens) > max_length:
        # A shortcut with the same result: find the last cut that fits, and skip all later ones. A text does not get
        # more tokens by losing its last one, and no token has more than `longest` characters. So a cut that fits has
        # another one that fits within `longest` characters before it, and where so many cuts in a row are too long,
        # all later ones are. At a single space or newline between two words one cut is enough, because no token
        # continues over it into the next word.
        longest = longest_token(tokenizer)
        end = bisect.bisect_left(range(len(body)), True, key=too_long)  # it is too long, and the cut before it fits
        for cut in range(end, len(body)):
            if not too_long(cut):
                end = cut + 1
            elif cut - end == longest or BETWEEN_WORDS.match(body, cut):
                break
        body = body[: max(end, 1)]
    while len(tokens) > max_length:
        if not body:
            raise ValueError(f"{field}: the query has {len(tokens)} tokens without it, more than {max_length}")
        body = body[: body.rfind("\n")]  # rfind is -1 without a newline: drops the last character
        query, tokens = query_of(body)
    return query, tokens


@functools.cache
def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the most characters that a token of the vocabulary has."""
    return max(map(len, tokenizer.get_vocab()))


def encode(tokenizer: PreTrainedTokenizerBase, text: str | list[str]) -> list:
    """Return the token ids of a text, or of each of several. Adds nothing, and treats special tokens in it as plain
    text."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


def query_columns(row: dict, tokenizer, max_length: int) -> dict:
    """Return query, query_token (max_length,) and query_token_len of an SFT row or a pair's `info`."""
    query, tokens = truncate_query(row, tokenizer, max_length)
    padding = [tokenizer.pad_token_id] * (max_length - len(tokens))
    return {
        "query": query,
        "query_token": padding + tokens,  # Detail 5: queries are padded on the left
        "query_token_len": len(tokens),
    }


def response_columns(name: str, text: str, query: dict, tokenizer, widths: tuple[int, int]) -> dict:
    """Return the columns of one response. name: reference_response, chosen or rejected; query: the output of
    query_columns; widths: of the response and of query + response."""
    pad_id = tokenizer.pad_token_id
    eos_id = tokenizer.eos_token_id
    response = text if text.startswith(" ") else f" {text}"  # Detail 3: a leading space, and EOS at the end
    # Query and response are tokenised as one string. strip() drops the newline that ends CNN/DM queries, as in the
    # authors' code, which measured the width of 2021 that way.
    joined = query["query"].strip() + response
    joined_tokens = encode(tokenizer, joined) + [eos_id]
    query_token = query["query_token"][-query["query_token_len"] :]  # without [PAD]
    label = mask_query(query_token, joined_tokens, pad_id)
    # The response's tokens are those after the query. Alone, a response may have other tokens, because some
    # tokenizers put a space before every text.
    tokens = [token for token in label if token != pad_id]
    return {
        name: response + tokenizer.eos_token,
        f"{name}_token": pad_right(tokens, pad_id, widths[0]),
        f"{name}_token_len": len(tokens),
        f"query_{name}": joined + tokenizer.eos_token,
        f"query_{name}_token": pad_right(joined_tokens, pad_id, widths[1]),
        f"query_{name}_token_len": len(joined_tokens),
        f"query_{name}_token_response_label": pad_right(label, pad_id, widths[1]),
    }


def pad_right(tokens: list[int], pad_id: int, width: int) -> list[int]:
    """Return tokens (n,) padded on the right to (width,) (Detail 5). Longer ones stay as they are, for check_widths to
    find."""
    return tokens + [pad_id] * (width - len(tokens))


def widths_of(args: Args, name: str, cnndm: bool) -> tuple[int, int]:
    """Return the widths of response and of query + response in the data set `name` (Details 4 and 5)."""
    query = MAX_QUERY_LENGTH_CNNDM if cnndm else args.max_query_length
    response = args.max_sft_response_length if name == "sft" else args.max_rm_response_length
    if cnndm and response == Args.max_rm_response_length:
        response = MAX_RM_RESPONSE_LENGTH_CNNDM
    return response, MEASURED_WIDTHS.get((query, response), query + response)


def mask_query(query_token: list[int], tokens: list[int], pad_id: int) -> list[int]:
    """Return a copy of `tokens` in which the prefix shared with `query_token` (unpadded) is replaced by pad_id."""
    shared = len(os.path.commonprefix([query_token, tokens]))
    return [pad_id] * shared + tokens[shared:]


def process_sft_row(row: dict, tokenizer, args: Args) -> dict:
    """Return all columns of an SFT row. Raises ValueError naming a field that is wrong."""
    columns = post_fields(row)
    query = query_columns(columns, tokenizer, args.max_query_length)
    widths = widths_of(args, "sft", cnndm=False)
    return columns | query | response_columns("reference_response", columns["summary"], query, tokenizer, widths)


def process_preference_row(row: dict, tokenizer, args: Args) -> dict:
    """Return all columns of a pair. Raises ValueError naming a field that is wrong."""
    columns = pair_fields(row)
    max_query_length = MAX_QUERY_LENGTH_CNNDM if is_cnndm(row) else args.max_query_length
    widths = widths_of(args, "preference", is_cnndm(row))
    query = query_columns(columns["info"], tokenizer, max_query_length)
    columns |= query
    chosen = columns["summaries"][columns["choice"]]
    rejected = columns["summaries"][1 - columns["choice"]]
    columns |= response_columns("chosen", chosen["text"], query, tokenizer, widths)
    columns |= response_columns("rejected", rejected["text"], query, tokenizer, widths)
    columns["chosen_policy"] = chosen["policy"]
    columns["rejected_policy"] = rejected["policy"]
    policies = [chosen["policy"] or "null", rejected["policy"] or "null"]
    columns["policies"] = "--".join(sorted(policies))  # Detail 6: (a, b) and (b, a) are one pair
    return columns


# ==== main ========================================================================================


def main(args: Args):
    # ---- 1. tokenizer ----------------------------------------------------------------------------
    name, revision = args.tokenizer, ""
    if not Path(name).exists():  # a local path may contain an @
        name, _, revision = name.partition("@")
    with or_fail(f"--tokenizer {args.tokenizer} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main", trust_remote_code=False)
    if tokenizer.eos_token is None:
        fail(f"--tokenizer {args.tokenizer} has no EOS token, which must end every response (Detail 3)")
    if max(tokenizer.get_vocab().values()) != len(tokenizer) - 1:
        fail(f"--tokenizer {args.tokenizer} leaves ids out, so [PAD] would get the id of another token")
    added = tokenizer.convert_ids_to_tokens(tokenizer("")["input_ids"])
    if added:
        console.print(
            f"--tokenizer {args.tokenizer} adds {' '.join(added)} to a text; no row here has it, so a model that "
            "expects it is trained without"
        )
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # Detail 3: never EOS, whatever padding it had before

    # ---- 2. raw rows -----------------------------------------------------------------------------
    output_dir = Path(args.output_dir).expanduser()
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        fail(f"{output_dir} already holds data: remove it, or choose another --output-dir")
    if args.push_to_hub and not (args.hub_id_sft and args.hub_id_preference):
        fail("--push-to-hub needs --hub-id-sft and --hub-id-preference")
    posts = read_raw(args.sft_dataset, SPLITS["sft"], SFT_COLUMNS)
    pairs = read_raw(args.preference_dataset, SPLITS["preference"], PREFERENCE_COLUMNS)
    raw = {"sft": posts, "preference": split_off_cnndm(pairs)}
    for name, splits in raw.items():
        print_row_counts(name, splits)

    with unfinished_folder(output_dir) as folder:
        # ---- 3. columns of every row -------------------------------------------------------------
        finished = folder / "finished"
        data = {"sft": DatasetDict(), "preference": DatasetDict()}
        for name in data:
            for split, rows in raw[name].items():
                data[name][split] = process_split(name, split, rows, tokenizer, args, folder)
        check_widths(args, raw, data)

        # ---- 4. statistics -----------------------------------------------------------------------
        for name in data:
            data[name].save_to_disk(finished / name)
        write_statistics(args, data, finished)
    console.print(f"wrote {output_dir}/sft, {output_dir}/preference and {output_dir}/statistics")

    # ---- 5. Hub ----------------------------------------------------------------------------------
    if args.push_to_hub:
        push("sft", args.hub_id_sft, args)
        push("preference", args.hub_id_preference, args)


# ==== raw rows ====================================================================================


def read_raw(source: str, splits: Iterable[str], required: Iterable[str]) -> dict[str, RawRows]:
    """Return {split: rows} of a folder or a Hub id. Ends with an error if a split is empty or a column is missing."""
    folder = Path(source).expanduser()
    raw = {}
    if not folder.is_dir():
        raw = read_hub(source, splits)
    for split in splits:
        paths = [path for path in (folder / f"{split}.jsonl", folder / f"{split}.parquet") if path.exists()]
        if len(paths) > 1:
            fail(f"{source} has both {paths[0].name} and {paths[1].name}: keep one")
        if paths:
            raw[split] = read_file(paths[0])
    if not raw:
        fail(f"{source} has none of the splits {', '.join(splits)}, each a .jsonl or .parquet file of that name")
    for split, rows in raw.items():
        columns = sorted(set().union(*(row for _, row in rows)))
        missing = [column for column in required if column not in columns]
        if missing:
            found = f"{len(rows)} rows without {', '.join(missing)}; found {', '.join(columns)}"
            fail(f"{source}: {split}: {found}")
    return raw


def read_file(path: Path) -> RawRows:
    """Return the rows of a .jsonl or .parquet file. Their `where` names the file and the row (for jsonl, the line)."""
    if path.suffix == ".parquet":
        with or_fail(f"{path}: not a parquet file"):
            table = pyarrow.parquet.read_table(path).to_pylist()
        return [(f"{path}, row {number}", row) for number, row in enumerate(table, 1)]
    rows = []
    with or_fail(f"{path}: not UTF-8"), open(path, encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, row {number}"
            with or_fail(f"{where}: invalid JSON"):
                row = json.loads(line)
            if not isinstance(row, dict):
                fail(f"{where}: not a JSON object")
            rows.append((where, row))
    return rows


def read_hub(source: str, splits: Iterable[str]) -> dict[str, RawRows]:
    """Return {split: rows} for those of the splits that a Hub id[@revision] has."""
    repository, _, revision = source.partition("@")
    with or_fail(f"{source} is not a folder with a .jsonl or .parquet file per split, nor a data set on the Hub"):
        configs = datasets.get_dataset_config_names(repository, revision=revision or None)
        config = "comparisons" if "comparisons" in configs else None
        loaded = load_dataset(repository, config, revision=revision or None)
    raw = {}
    for split in splits:
        if split in loaded:
            rows = enumerate(loaded[split], 1)
            raw[split] = [(f"{source} {split}, row {number}", row) for number, row in rows]
    return raw


def split_off_cnndm(raw: dict[str, RawRows]) -> dict[str, RawRows]:
    """Move the CNN/DM rows of `validation` to `validation_cnndm`, before the rows already there (Detail 1)."""
    for split, rows in raw.items():
        if split == "validation":
            continue
        for where, row in rows:
            if is_cnndm(row) != (split == "validation_cnndm"):
                fail(f"{where}: info.article: CNN/DM rows, and no others, belong in validation_cnndm (or validation)")
    splits = raw | {"validation": [], "validation_cnndm": []}
    for where, row in raw.get("validation", []):
        split = "validation_cnndm" if is_cnndm(row) else "validation"
        splits[split].append((where, row))
    splits["validation_cnndm"] += raw.get("validation_cnndm", [])
    return {split: splits[split] for split in SPLITS["preference"] if splits.get(split)}


def is_cnndm(row: dict) -> bool:
    """Return whether a raw pair compares summaries of a CNN/DM article (Detail 1)."""
    info = row.get("info")
    has_article = isinstance(info, dict) and info.get("article") is not None
    return has_article or row.get("batch") in CNNDM_BATCHES


def print_row_counts(name: str, splits: dict[str, RawRows]):
    counts = []
    for split in SPLITS[name]:
        count = len(splits[split]) if split in splits else "absent"
        counts.append(f"{split} {count}")
    console.print(f"{name} rows: {', '.join(counts)}")


def post_fields(row: dict) -> dict:
    """Return the columns of an SFT row that are stored unchanged. Raises ValueError naming a field that is wrong."""
    subreddit = text_field(row, "subreddit", "subreddit", required=False) or ""
    needed = {field: text_field(row, field, field) for field in SFT_COLUMNS if field != "subreddit"}
    return {field: needed.get(field, subreddit) for field in SFT_COLUMNS}


def pair_fields(row: dict) -> dict:
    """Return the columns of a pair that are stored unchanged. Raises ValueError naming a field that is wrong."""
    info = row.get("info")
    summaries = row.get("summaries")
    choice = row.get("choice")
    extra = row.get("extra")
    needed = ("article",) if is_cnndm(row) else ("title", "post")
    for field in needed:
        text_field(info, field, f"info.{field}")
    if not isinstance(summaries, list) or len(summaries) != 2:
        raise ValueError(f"summaries should be a list of two, not {summaries!r:.80}")
    if type(choice) is not int or choice not in (0, 1):  # True is an int in Python, but not a choice
        raise ValueError(f"choice should be 0 or 1, not {choice!r:.80}")
    confidence = extra.get("confidence") if isinstance(extra, dict) else extra
    if type(confidence) not in (int, type(None)):
        raise ValueError(f"extra.confidence should be an integer or null, not {confidence!r:.80}")
    columns = {"id": text_field(info, "id", "info.id", required=False)}
    columns["info"] = {field: text_field(info, field, f"info.{field}", required=False) for field in INFO_FIELDS}
    columns["summaries"] = [{}, {}]
    for i, summary in enumerate(summaries):
        for field in ("text", "policy", "note"):
            text = text_field(summary, field, f"summaries[{i}].{field}", required=field == "text")
            columns["summaries"][i][field] = text
    columns["choice"] = choice
    columns["extra"] = {"confidence": confidence}
    for field in ("worker", "batch", "split"):
        columns[field] = text_field(row, field, field, required=False)
    return columns


def text_field(record: dict, field: str, name: str, required: bool = True) -> str | None:
    """Return record[field], which must be a string (if `required`, not blank; if not, it may be null). Raises
    ValueError with `name` otherwise."""
    if not isinstance(record, dict):
        raise ValueError(f"{name} is missing: found {record!r:.80} where an object should be")
    if required and field not in record:
        raise ValueError(f"{name} is missing; found {', '.join(map(str, record))}")
    value = record.get(field)
    if value is None and not required:
        return None
    if not isinstance(value, str):
        raise ValueError(f"{name} should be text, not {value!r:.80}")
    if required and not value.strip():
        raise ValueError(f"{name} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} holds half a surrogate pair, which is no text") from None
    return value


def column_types(name: str) -> Features:
    """Return the columns of the data set `name` and their types."""
    text = Value("string")
    number = Value("int64")
    tokens = List(number)  # of any length, as published: all splits of a DatasetDict must have the same types
    features = dict.fromkeys(SFT_COLUMNS, text)
    if name == "preference":
        features = {
            "id": text,
            "info": dict.fromkeys(INFO_FIELDS, text),
            "summaries": List({"text": text, "policy": text, "note": text}),
            "choice": Value("int32"),
            **dict.fromkeys(("worker", "batch", "split"), text),
            "extra": {"confidence": Value("int32")},
        }
    features |= {"query": text, "query_token": tokens, "query_token_len": number}
    for response in RESPONSES[name]:
        for part in (response, f"query_{response}"):
            features |= {part: text, f"{part}_token": tokens, f"{part}_token_len": number}
        features[f"query_{response}_token_response_label"] = tokens
    if name == "preference":
        features |= dict.fromkeys(("chosen_policy", "rejected_policy", "policies"), text)
    return Features(features)


# ==== all rows in parallel ========================================================================


def process_split(name: str, split: str, rows: RawRows, tokenizer, args: Args, folder: Path) -> Dataset:
    """Return all columns of all rows, in order; the first bad row ends the run. Each process gets consecutive rows."""
    fields, process = (post_fields, process_sft_row) if name == "sft" else (pair_fields, process_preference_row)
    checked = []
    for where, row in rows:
        try:
            checked.append({"where": where} | fields(row))
        except ValueError as error:
            fail(f"{where}: {error}")
    types = column_types(name)
    stored = {"where": Value("string")} | {column: types[column] for column in types if column in checked[0]}

    def columns(row: dict) -> dict:
        try:
            return process(dict(row), tokenizer, args)
        except ValueError as error:
            raise ValueError(f"{row['where']}: {error}") from None

    processes = min(args.num_proc, -(-len(rows) // 100))  # starting a process takes as long as 100 rows
    settings = {"num_proc": processes if processes > 1 else None, "new_fingerprint": f"{name}_{split}"}
    settings["cache_file_name"] = f"{folder}/{name}_{split}/rows.arrow"  # a fresh folder, so nothing is stale
    try:
        data = Dataset.from_list(checked, features=Features(stored))
        return data.map(columns, features=types, remove_columns=["where"], desc=f"{name} {split}", **settings)
    except (ValueError, pyarrow.ArrowInvalid) as error:
        fail(str(error))


def check_widths(args: Args, raw: dict[str, dict[str, RawRows]], data: dict[str, DatasetDict]):
    """End with an error if a row is longer than its width (Detail 4). The message names each flag with the length that
    all rows need, and the row with the longest response."""
    flags = []
    for name, splits in data.items():
        longest, too_long = (0, ""), False
        for split, rows in splits.items():
            widths = widths_of(args, name, split == "validation_cnndm")
            for response in RESPONSES[name]:
                lengths, joined = rows[f"{response}_token_len"][:], rows[f"query_{response}_token_len"][:]
                index = max(range(len(lengths)), key=lengths.__getitem__)
                longest = max(longest, (lengths[index], raw[name][split][index][0]))
                too_long = too_long or lengths[index] > widths[0] or max(joined) > widths[1]
        flag = "max_sft_response_length" if name == "sft" else "max_rm_response_length"
        # With a length other than the paper's, the width of query + response is the sum of both widths.
        length = longest[0] + (longest[0] == getattr(Args, flag))
        if too_long:
            flags.append(f"--{flag.replace('_', '-')} {length} ({longest[1]})")
    if flags:
        fail(f"rows are longer than their widths; all of them fit with {', '.join(flags)}")


@contextmanager
def unfinished_folder(output_dir: Path):
    """Yield a temporary folder whose subfolder `finished` becomes the output folder at the end: by one rename or, if
    the output folder exists (a symlink, a mount point), part by part. If anything fails, nothing of it is left
    behind."""
    target = output_dir.resolve()
    beside = target if target.exists() else target.parent
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.tmp-", dir=beside) as folder:
        yield Path(folder)
        finished = Path(folder, "finished")
        if not target.exists():
            finished.rename(target)
            return
        for part in finished.iterdir():
            part.rename(target / part.name)


# ==== statistics ==================================================================================


def write_statistics(args: Args, data: dict[str, DatasetDict], folder: Path):
    """Write tables and figures to folder/statistics and a data card to each data set, and print the tables."""
    statistics = folder / "statistics"
    statistics.mkdir()
    lengths = []
    for name, splits in data.items():
        table, figure = length_statistics(name, splits)
        lengths.append(table)
        figure.savefig(statistics / f"lengths_{name}.png", dpi=100)  # figures 2 and 3
        card = card_text(name, args, table)
        (folder / name / "README.md").write_text(card, encoding="utf-8")
    tables = pair_tables(data["preference"])
    tables["truncation"] = truncation_table(data)
    tables["lengths"] = pd.concat(lengths, ignore_index=True)
    for name, table in tables.items():
        table.to_csv(statistics / f"{name}.csv", index=False)
        console.print(f"\n{name}.csv, {len(table)} rows:\n{table.head(30).to_string(index=False)}")


def length_statistics(name: str, data: DatasetDict) -> tuple[pd.DataFrame, Figure]:
    """Return lengths in tokens per split and column with their limits (Detail 4), and their histograms (figures 2 and
    3)."""
    columns = [column for column in next(iter(data.values())).column_names if column.endswith("_token_len")]
    figure = Figure(figsize=(4 * len(columns), 3 * len(data)), layout="constrained")
    plots = figure.subplots(len(data), len(columns), squeeze=False)
    records = []
    for i, (split, dataset) in enumerate(data.items()):
        for j, column in enumerate(columns):
            text = column.removesuffix("_token_len")
            limit = len(dataset[0][f"{text}_token"])
            lengths = pd.Series(dataset[column][:])
            record = {
                "dataset": name,
                "split": split,
                "text": text,
                "rows": len(lengths),
                "min": lengths.min(),
                "median": lengths.median(),
                "mean": round(lengths.mean(), 1),
                "max": lengths.max(),
                "limit": limit,
            }
            records.append(record)
            title = f"{split}: {text}\nmax {lengths.max()}, limit {limit}"
            plots[i, j].hist(lengths, bins=100, range=(0, limit))
            plots[i, j].set(title=title, xlabel="tokens", ylabel="rows")
    return pd.DataFrame(records), figure


def pair_tables(pairs: DatasetDict) -> dict[str, pd.DataFrame]:
    """Return {name: table}: tables 21-27 (one per split) and 2 (Detail 6), and pairs per batch, split and confidence
    (Detail 1)."""
    tables = {}
    unique = []
    groups = []
    for split, dataset in pairs.items():
        counts = policy_pair_counts(dataset["policies"])
        rows = [(policies.replace("--", ", "), count) for policies, count in counts]
        tables[f"policy_pairs_{split}"] = pd.DataFrame(rows, columns=["policies", "count"])
        unique.append({"split": split, "unique pairs": len(counts)})
        columns = dataset.flatten().select_columns(["batch", "split", "extra.confidence"])
        for column, values in columns[:].items():
            counts = Counter("null" if value is None else value for value in values)
            for value, count in sorted(counts.items(), key=str):
                groups.append({"split": split, "column": column, "value": value, "pairs": count})
    tables["policy_pairs"] = pd.DataFrame(unique)
    tables["groups"] = pd.DataFrame(groups)
    return tables


def policy_pair_counts(policies: Iterable[str]) -> list[tuple[str, int]]:
    """Return (pair of policies, its count), the most frequent first, ties by name (Detail 6, tables 21-27)."""
    counts = Counter(policies)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def truncation_table(data: dict[str, DatasetDict]) -> pd.DataFrame:
    """Return how many queries of each split were cut and how (Detail 2), and how many had no subreddit."""
    records = []
    for name, splits in data.items():
        columns = ["info", "query"] if name == "preference" else [*SFT_COLUMNS, "query"]
        for split, dataset in splits.items():
            counts = Counter()
            for row in dataset.select_columns(columns):
                info = row.get("info", row)
                counts[truncation(info, row["query"])] += 1
                counts["null subreddit"] += info.get("article") is None and not info["subreddit"]
            record = {
                "dataset": name,
                "split": split,
                "queries": len(dataset),
                "cut at a newline": counts["newline"],
                "cut by characters": counts["character"],
                "null subreddit": counts["null subreddit"],
            }
            records.append(record)
    return pd.DataFrame(records)


def truncation(row: dict, query: str) -> str:
    """Return how truncate_query(row, …) made `query`: "none", "newline" or "character" (at least one single
    character)."""
    body = row["article"] if row.get("article") is not None else row["post"]
    kept = len(body) - (len(format_query(row)) - len(query))
    if kept == len(body):
        return "none"
    return "newline" if body[kept] == "\n" else "character"


def card_text(name: str, args: Args, lengths: pd.DataFrame) -> str:
    """Return the body of the data card: where the data come from, the command line, and token lengths."""
    source = args.sft_dataset if name == "sft" else args.preference_dataset
    command = shlex.join(["python", *sys.argv])
    table = lengths.drop(columns="dataset").to_string(index=False)
    return f"""# TL;DR {name} data, pre-tokenised

Made from `{source}` with the tokenizer `{args.tokenizer}` and a `[PAD]` token added to it, after Details 1-6 of
"The N+ Implementation Details of RLHF with PPO". `query_token` is padded on the left, all other tokens on the right.
In `…_response_label` the query is replaced by the pad id.

```
{command}
{table}
```
"""


# ==== Hub =========================================================================================


def push(name: str, repository: str, args: Args):
    """Push a finished data set and its card. If that fails, the error says how to do it later."""
    folder = f"{args.output_dir}/{name}"
    revision = args.hub_revision
    later = f"load_from_disk('{folder}').push_to_hub('{repository}', revision='{revision}')"
    complete = f"the data are complete in {args.output_dir}"
    with or_fail(f"the push to {repository} failed, but {complete}; push later with {later}"):
        load_from_disk(folder).push_to_hub(repository, revision=revision)
        file = {"repo_id": repository, "repo_type": "dataset", "revision": revision}
        card = DatasetCard.load(hf_hub_download(filename="README.md", **file))
        card.text = Path(folder, "README.md").read_text(encoding="utf-8")
        HfApi().upload_file(path_or_fileobj=str(card).encode(), path_in_repo="README.md", **file)
    console.print(f"pushed {name} to {repository}@{revision}")


# ==== errors ======================================================================================


def fail(message: str):
    """End the process with one clear message on standard error and exit code 1."""
    raise SystemExit(f"error: {message}")


@contextmanager
def or_fail(message: str):
    """Run a block that depends on files, disk or network, and turn any exception there into one clear error message."""
    try:
        yield
    except Exception as error:  # each file format raises its own kinds of error
        fail(f"{message} ({error!r:.300})")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # print ? where the terminal cannot show a character
    main(tyro.cli(Args))
