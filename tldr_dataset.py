"""Raw TL;DR posts and comparisons -> pre-tokenised data sets, with length statistics and plots (Details 1-6).

    # paper scale: both published data sets, from the Hub
    python tldr_dataset.py --output-dir data/tldr
    # from local folders with train|validation|test|validation_cnndm.jsonl (or .parquet)
    python tldr_dataset.py --sft-dataset raw/posts --preference-dataset raw/comparisons --tokenizer raw/tokenizer
    # and publish the result
    python tldr_dataset.py --push-to-hub --hub-id-sft me/tldr-sft --hub-id-preference me/tldr-preference
    # look at every row of a finished data set for damage
    python tldr_dataset.py --check data/tldr

Writes OUTPUT_DIR/sft and OUTPUT_DIR/preference (`datasets.load_from_disk`) and OUTPUT_DIR/statistics (CSV, PNG).
The rows are shared out to all cores (--num-proc); the data sets are the same bytes for any number of processes.
The columns are those of the published vwxyzjn/…_oai_preprocessing_1706381144 data sets.

The file goes from the details outwards: arguments, queries and responses, main, raw rows, all rows in parallel,
statistics, check, Hub.

Terms: a query is a post (or a CNN/DM article) in its template. A response is a summary with a leading space and EOS.
`X_token` holds the token ids of the text `X`, padded to a width; `X_token_len` counts them without [PAD].
`info` is the post of a raw pair. `where` names the file and the row of a raw row, for messages.

Deliberate deviations from the paper and its code:
- Rows over their width end the run with an error that names the widths that all rows need; the authors' code cut such
  rows silently, EOS included.
- A response's tokens are those behind the query in the joined row. With Pythia's tokenizer they are what the response
  by itself has, as in the authors' code; a tokenizer that puts a space before every text (Llama 2's) differs there.
- Nothing is added to a text. If the tokenizer would add a BOS, a line says that no row has it.
- The response label hides the tokens that query and query+response share, not the first `query_token_len` ones:
  after CNN/DM queries (they end in a newline, which the join drops) the latter also hides a token of the response.
- Text that happens to spell `<|endoftext|>` or `[PAD]` is tokenised as plain text: only our own EOS ends a response.
- `query` is the formatted text. The authors stored decode(query_token), by a tokenizer that takes the space away
  before punctuation. `query_token` and the tokens of the responses are the same. `query_…_token` and its label are
  not, in 4.7 % of the rows: both scripts make them from the text of `query`.
- CNN/DM pairs are recognised by their article as well as by their batch.
- A missing subreddit or policy (real pairs have both) becomes "" and "null", and is counted.
- `validation_cnndm` rows and ties in the policy tables keep a fixed order: file order, then name.
"""

import bisect
import json
import os
import pickle
import re
import shlex
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import datasets
import pandas as pd
import pyarrow.parquet
import tqdm.rich
import tyro
from datasets import Dataset, DatasetDict, Features, List, Value, disable_progress_bars, load_dataset, load_from_disk
from huggingface_hub import DatasetCard, HfApi, hf_hub_download
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

TLDR_TEMPLATE = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"  # Detail 2: no trailing space
CNNDM_TEMPLATE = "Article:\n{article}\n\nTL;DR:\n"
CNNDM_BATCHES = ("batch0_cnndm", "cnndm0", "cnndm2")  # Detail 1
SFT_COLUMNS = ("id", "subreddit", "title", "post", "summary")  # Detail 1
PREFERENCE_COLUMNS = ("info", "summaries", "choice", "batch", "split", "extra")  # Detail 1
INFO_FIELDS = ("id", "post", "title", "subreddit", "site", "article")
RESPONSES = {"sft": ("reference_response",), "preference": ("chosen", "rejected")}
SPLITS = {"sft": ("train", "validation", "test"), "preference": ("train", "validation", "test", "validation_cnndm")}
RawRows = list[tuple[str, dict]]  # [(where, row), …]
QUERY_DIFFERS = "query"  # no damage but that `query` does not tokenise back to query_token, as in the published data

# plain text, no markup: policies and titles are data; wide enough for the tables when the output is a file
console = Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 120)


@dataclass
class Args:
    sft_dataset: str = "vwxyzjn/summarize_from_feedback_tldr_3_filtered"
    """posts with reference summaries: a Hub id (`@revision` allowed) or a folder of jsonl/parquet files (Detail 1)"""
    preference_dataset: str = "openai/summarize_from_feedback"
    """pairs of summaries with a choice: a Hub id (its config `comparisons`) or a folder (Detail 1)"""
    tokenizer: str = "EleutherAI/pythia-1b-deduped"
    """tokenizer of the models to be trained: a Hub id (`@revision` allowed) or a folder; `[PAD]` is added (Detail 3)"""
    output_dir: str = "data/tldr"
    """folder to write; it must not hold anything yet"""
    check: str = ""
    """write nothing; look for damage in what is in this folder of ours (or in one of its data sets, or a Hub id)"""
    num_proc: int = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    """processes that share the rows; all cores that this one may use"""

    max_query_length: int = 512
    """tokens: longer TL;DR queries are truncated to it (Detail 2), shorter ones left-padded (Detail 5)"""
    max_query_length_cnndm: int = 1919
    """tokens: the same for CNN/DM queries (2047 - 128, as in OpenAI's code)"""
    max_sft_response_length: int = 53
    """tokens of a reference summary with leading space and EOS (Detail 4)"""
    max_sft_query_response_length: int = 562
    """tokens of query + reference summary (Detail 5)"""
    max_rm_response_length: int = 169
    """tokens of a compared summary with leading space and EOS (Detail 4)"""
    max_rm_query_response_length: int = 638
    """tokens of query + compared summary (Detail 5)"""
    max_rm_response_length_cnndm: int = 155
    """tokens of a compared CNN/DM summary with leading space and EOS (Detail 4)"""
    max_rm_query_response_length_cnndm: int = 2021
    """tokens of CNN/DM query + compared summary (Detail 5)"""

    push_to_hub: bool = False
    """also push both data sets to the Hub, each with a data card"""
    hub_id_sft: str = ""
    """repository of the SFT data set, `owner/name`; needed by --push-to-hub"""
    hub_id_preference: str = ""
    """repository of the preference data set, `owner/name`; needed by --push-to-hub"""
    hub_revision: str = "main"
    """branch of both to push to, made if it is not there"""


# ==== the algorithm ===============================================================================


def format_query(row: dict) -> str:
    """The query text of an SFT row or a pair's `info`: CNN/DM's template if it has an article, else TL;DR's."""
    if row.get("article") is not None:
        return CNNDM_TEMPLATE.format(article=row["article"])
    return TLDR_TEMPLATE.format(subreddit=row.get("subreddit") or "", title=row["title"], post=row["post"])


def truncate_query(row: dict, tokenizer: PreTrainedTokenizerBase, max_length: int) -> tuple[str, list[int]]:
    """(query text, its token ids), at most max_length tokens (Detail 2).

    While the query is too long, its post (CNN/DM: its article) loses everything from its last newline on; once there
    is none left, its last character. Template and title stay whole. ValueError if even an empty post does not fit.
    """
    field = "article" if row.get("article") is not None else "post"

    def query_of(body: str) -> tuple[str, list[int]]:
        query = format_query({**row, field: body})
        return query, encode(tokenizer, query)

    body = row[field]
    query, tokens = query_of(body)
    if len(tokens) > max_length:
        # A shortcut with the same result, for posts of a megabyte: no token reaches over a single space or newline
        # between two words into the next word, so a cut there has at most the tokens of any cut behind it. Hence the
        # first such cut that is too long rules out every cut behind it.
        cuts = [match.start() for match in re.finditer(r"(?<=\w)[ \n](?=\w)", body)]
        first = bisect.bisect_left(cuts, True, key=lambda cut: len(query_of(body[:cut])[1]) > max_length)
        body = body[: cuts[first]] if first < len(cuts) else body
    while len(tokens) > max_length:
        if not body:
            raise ValueError(f"{field}: the query has {len(tokens)} tokens without it, more than {max_length}")
        body = body[: body.rfind("\n")]  # rfind is -1 without a newline: drops the last character
        query, tokens = query_of(body)
    return query, tokens


def encode(tokenizer: PreTrainedTokenizerBase, text: str | list[str]) -> list:
    """Token ids of plain text, or of each of several: nothing added, and what spells a special token stays text."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


def query_columns(row: dict, tokenizer, max_length: int) -> dict:
    """query, query_token (max_length,), query_token_len of an SFT row or a pair's `info`."""
    query, tokens = truncate_query(row, tokenizer, max_length)
    padding = [tokenizer.pad_token_id] * (max_length - len(tokens))
    return {
        "query": query,
        "query_token": padding + tokens,  # Detail 5: queries are padded on the left
        "query_token_len": len(tokens),
    }


def response_columns(name: str, text: str, query: dict, tokenizer, args: Args, limits: tuple[str, str]) -> dict:
    """The columns of one response, `name` being reference_response, chosen or rejected. query: what `query_columns`
    returns. limits: names of the fields of `args` that hold the widths of response and of query + response."""
    pad_id = tokenizer.pad_token_id
    eos_id = tokenizer.eos_token_id
    response = text if text.startswith(" ") else f" {text}"  # Detail 3: a leading space, and EOS at the end
    # One string is tokenised, not two. strip() drops the newline that ends CNN/DM queries, as in the authors' code:
    # the width of 2021 was measured that way.
    joined = query["query"].strip() + response
    joined_tokens = encode(tokenizer, joined) + [eos_id]
    query_token = query["query_token"][-query["query_token_len"] :]  # without [PAD]
    label = mask_query(query_token, joined_tokens, pad_id)
    # the response's tokens are those behind the query: by itself a response may have others (a tokenizer that puts a
    # space before every text)
    tokens = [token for token in label if token != pad_id]
    return {
        name: response + tokenizer.eos_token,
        f"{name}_token": pad_right(tokens, pad_id, getattr(args, limits[0])),
        f"{name}_token_len": len(tokens),
        f"query_{name}": joined + tokenizer.eos_token,
        f"query_{name}_token": pad_right(joined_tokens, pad_id, getattr(args, limits[1])),
        f"query_{name}_token_len": len(joined_tokens),
        f"query_{name}_token_response_label": pad_right(label, pad_id, getattr(args, limits[1])),
    }


def pad_right(tokens: list[int], pad_id: int, width: int) -> list[int]:
    """tokens (n,) padded on the right to (width,) (Detail 5); check_widths finds those that are longer."""
    return tokens + [pad_id] * (width - len(tokens))


def width_flags(name: str, cnndm: bool = False) -> tuple[str, str]:
    """The fields of Args that hold the widths of response and of query + response in the data set `name`."""
    if name == "sft":
        return "max_sft_response_length", "max_sft_query_response_length"
    suffix = "_cnndm" if cnndm else ""
    return f"max_rm_response_length{suffix}", f"max_rm_query_response_length{suffix}"


def mask_query(query_token: list[int], tokens: list[int], pad_id: int) -> list[int]:
    """A copy of `tokens` in which the prefix that it shares with `query_token` (unpadded) is pad_id."""
    shared = len(os.path.commonprefix([query_token, tokens]))
    return [pad_id] * shared + tokens[shared:]


def process_sft_row(row: dict, tokenizer, args: Args) -> dict:
    """All columns of one SFT row; ValueError naming the field that is wrong."""
    columns = {"id": text_field(row, "id", "id")}
    columns["subreddit"] = text_field(row, "subreddit", "subreddit", required=False) or ""
    for field in ("title", "post", "summary"):
        columns[field] = text_field(row, field, field)
    query = query_columns(columns, tokenizer, args.max_query_length)
    limits = width_flags("sft")
    response = response_columns("reference_response", columns["summary"], query, tokenizer, args, limits)
    return columns | query | response


def process_preference_row(row: dict, tokenizer, args: Args) -> dict:
    """All columns of one pair; ValueError naming the field that is wrong."""
    columns = pair_fields(row)
    max_query_length = args.max_query_length_cnndm if is_cnndm(row) else args.max_query_length
    limits = width_flags("preference", is_cnndm(row))
    query = query_columns(columns["info"], tokenizer, max_query_length)
    columns |= query
    chosen = columns["summaries"][columns["choice"]]
    rejected = columns["summaries"][1 - columns["choice"]]
    columns |= response_columns("chosen", chosen["text"], query, tokenizer, args, limits)
    columns |= response_columns("rejected", rejected["text"], query, tokenizer, args, limits)
    columns["chosen_policy"] = chosen["policy"]
    columns["rejected_policy"] = rejected["policy"]
    policies = [chosen["policy"] or "null", rejected["policy"] or "null"]
    columns["policies"] = "--".join(sorted(policies))  # Detail 6: (a, b) and (b, a) are one pair
    return columns


# ==== main ========================================================================================


def main(args: Args):
    disable_progress_bars()  # of `datasets`; ours shows rate and time left
    warnings.filterwarnings("ignore", category=tqdm.TqdmExperimentalWarning)

    # ---- 1. tokenizer ----------------------------------------------------------------------------
    name, revision = args.tokenizer, ""
    if not Path(name).exists():  # a path may hold an @
        name, _, revision = name.partition("@")
    with or_fail(f"--tokenizer {args.tokenizer} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main", trust_remote_code=False)
    if tokenizer.eos_token is None:
        fail(f"--tokenizer {args.tokenizer} has no EOS token, which ends every response (Detail 3)")
    added = tokenizer.convert_ids_to_tokens(tokenizer("")["input_ids"])
    if added:
        console.print(f"--tokenizer {args.tokenizer} adds {' '.join(added)} to a text; no row here has it")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # Detail 3: never EOS, whatever padding it had before
    if args.check:
        check(args, tokenizer)
        return

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
        data = {}
        for name, process_row in (("sft", process_sft_row), ("preference", process_preference_row)):
            process = partial(process_row, tokenizer=tokenizer, args=args)
            features = column_types(name)
            data[name] = DatasetDict()
            for split, rows in raw[name].items():
                label = f"{name} {split}"
                data[name][split] = process_split(label, rows, process, features, args.num_proc, folder)
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
    """{split: rows} of a folder or a Hub id; ends with an error on an empty split or a missing column."""
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
    """Rows of one .jsonl or .parquet file; `where` names file and row (for jsonl: the line)."""
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
    """{split: rows} of the splits that a Hub id[@revision] has."""
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
    """Detail 1: move the CNN/DM rows of `validation` to `validation_cnndm`, in front of the rows already there."""
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
    """Detail 1: does this raw pair compare summaries of a CNN/DM article?"""
    info = row.get("info")
    has_article = isinstance(info, dict) and info.get("article") is not None
    return has_article or row.get("batch") in CNNDM_BATCHES


def print_row_counts(name: str, splits: dict[str, RawRows]):
    counts = []
    for split in SPLITS[name]:
        count = len(splits[split]) if split in splits else "absent"
        counts.append(f"{split} {count}")
    console.print(f"{name} rows: {', '.join(counts)}")


def pair_fields(row: dict) -> dict:
    """The columns of a pair that are stored as they are; ValueError naming the field that is wrong."""
    info = row.get("info")
    summaries = row.get("summaries")
    choice = row.get("choice")
    extra = row.get("extra")
    needed = ("article",) if is_cnndm(row) else ("title", "post")
    for field in needed:
        text_field(info, field, f"info.{field}")
    if not isinstance(summaries, list) or len(summaries) != 2:
        raise ValueError(f"summaries should be a list of two, not {summaries!r:.80}")
    if type(choice) is not int or choice not in (0, 1):  # bool is a kind of int, but no choice
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
    """record[field], which must be a string (not blank if `required`, else it may be null); ValueError by `name`."""
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
    """Columns and types of the data set `name`."""
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


def process_split(label: str, rows: RawRows, process: Callable, features: Features, num_proc: int, folder) -> Dataset:
    """Dataset of process(row) for all rows; the first bad row ends the run."""

    def columns(raw: dict) -> dict:
        try:
            return process(pickle.loads(raw["row"]))
        except ValueError as error:
            raise ValueError(raw["where"], str(error)) from None

    pickled = [{"where": where, "row": pickle.dumps(row)} for where, row in rows]  # of any type, if bad
    raw = Dataset.from_list(pickled)
    try:
        return map_rows(label, raw, columns, features, num_proc, folder)
    except ValueError as bad_row:
        where, error = (label, *bad_row.args)[-2:]  # an error of `datasets` itself names no row
        fail(f"{where}: {error}")


def check_widths(args: Args, raw: dict[str, dict[str, RawRows]], data: dict[str, DatasetDict]):
    """End with an error where a row is longer than its width (Detail 4): with each flag, the length that all rows need,
    and the row that needs it."""
    needed = {}  # flag: (tokens, where)
    for name, splits in data.items():
        for split, rows in splits.items():
            for response in RESPONSES[name]:
                columns = f"{response}_token_len", f"query_{response}_token_len"
                for column, flag in zip(columns, width_flags(name, split == "validation_cnndm"), strict=True):
                    lengths = rows[column][:]
                    longest = max(range(len(lengths)), key=lengths.__getitem__)
                    row = lengths[longest], raw[name][split][longest][0]
                    needed[flag] = max(needed.get(flag, row), row)
    too_long = []
    for flag, (length, where) in needed.items():
        if length > getattr(args, flag):
            too_long.append(f"--{flag.replace('_', '-')} {length} ({where})")
    if too_long:
        fail(f"rows are longer than their widths; all of them fit with {', '.join(too_long)}")


@contextmanager
def unfinished_folder(output_dir: Path):
    """Yield a temporary folder, whose `finished` becomes the output folder at the end: at once or, where that exists (a
    symlink, a mount point), part by part. If anything fails, nothing of it is left behind."""
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


def map_rows(label: str, data: Dataset, function: Callable, features: Features, num_proc: int, folder) -> Dataset:
    """Dataset of function(row), rows in order, in a file of `folder`. Each process has consecutive rows and ends with
    its first error; the error of the first such process, which is the first in the order of the rows, is raised."""
    num_proc = min(num_proc, -(-len(data) // 100))  # to start a process takes as long as 100 rows
    name = re.sub(r"\W", "_", label)
    settings = {
        "features": features,
        "remove_columns": data.column_names,
        "new_fingerprint": name,
        "cache_file_name": f"{folder}/{name}/rows.arrow",  # in a fresh folder: nothing can be stale
        "num_proc": num_proc if num_proc > 1 else None,
        "desc": label,
    }
    columns = (BarColumn(), MofNCompleteColumn(), tqdm.rich.RateColumn(" rows"), TimeRemainingColumn())
    progress = ("{task.description}", *columns)
    bar = partial(tqdm.rich.tqdm, progress=progress, options={"console": console})
    with mock.patch.object(datasets.arrow_dataset, "hf_tqdm", bar):
        return data.map(function, **settings)


# ==== statistics ==================================================================================


def write_statistics(args: Args, data: dict[str, DatasetDict], folder: Path):
    """Writes tables and figures to folder/statistics and a data card to each data set; prints the tables."""
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
    """Detail 4: lengths in tokens per split and column beside their limits; figures 2 and 3: their histograms."""
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
    """{name: table}: tables 21-27, one a split, and 2 (Detail 6); pairs per batch, split and confidence (Detail 1)."""
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
    """Detail 6, tables 21-27: (pair of policies, its count), the most frequent first, ties by name."""
    counts = Counter(policies)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def truncation_table(data: dict[str, DatasetDict]) -> pd.DataFrame:
    """Detail 2: how many queries of each split were cut, and how; how many had no subreddit."""
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
    """How truncate_query(row, …) made `query`: "none", "newline" or "character" (at least one single character)."""
    body = row["article"] if row.get("article") is not None else row["post"]
    kept = len(body) - (len(format_query(row)) - len(query))
    if kept == len(body):
        return "none"
    return "newline" if body[kept] == "\n" else "character"


def card_text(name: str, args: Args, lengths: pd.DataFrame) -> str:
    """Body of the data card: where the data come from, command line, token lengths."""
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


# ==== check =======================================================================================


def check(args: Args, tokenizer):
    """Look at every row of a finished data set, or of both in a folder; the first damaged split ends the run."""
    paths = [f"{Path(args.check, name)}" for name in SPLITS if Path(args.check, name).is_dir()]
    for path in paths or [args.check]:
        name, _, revision = path.partition("@")
        with or_fail(f"--check {path}: no data set with the splits train and validation. Make it with tldr_dataset.py"):
            data = load_from_disk(path) if Path(path).exists() else load_dataset(name, revision=revision or None)
            splits = {split: data[split] for split in ("train", "validation", *data)}
        for split, rows in splits.items():
            check_split(path, split, rows, args, tokenizer)


def check_split(path: str, split: str, rows: Dataset, args: Args, tokenizer):
    """Look at every row of a split; ends where one is damaged, or where most of the queries do not tokenise back."""
    place = f"--check {path}: {split}"
    remedy = f"If another tokenizer than {args.tokenizer} made it, name that with --tokenizer; else make it again"
    name = "preference" if any("chosen" in column for column in rows.column_names) else "sft"
    needed = [column for column in column_types(name) if column.startswith(("query", *RESPONSES[name]))]
    missing = [column for column in needed if column not in (*rows.column_names, "query_token_len")]
    if missing or len(rows) == 0:
        fail(f"{place} has {len(rows)} rows and lacks the columns {missing}. {remedy}")
    with or_fail(f"{place} cannot be read. {remedy}"), tempfile.TemporaryDirectory() as folder:
        widths = {column: len(rows[0][column] or []) for column in needed if column.endswith("_token")}
        function = partial(find_damage, tokenizer=tokenizer, widths=widths)
        label = f"{Path(path).name} {split}"
        features = Features({"damage": Value("string")})
        damages = map_rows(label, rows, function, features, args.num_proc, folder)["damage"][:]
    damaged = [f"row {i}: {damage}" for i, damage in enumerate(damages) if damage not in ("", QUERY_DIFFERS)]
    if damaged:
        fail(f"{place}, {damaged[0]} ({len(damaged)} of {len(rows)} rows are damaged). {remedy}")
    differ = damages.count(QUERY_DIFFERS)
    report = f"in {differ} of {len(rows)} rows `query` does not tokenise back to query_token"
    if 2 * differ > len(rows):
        fail(f"{place}: {report}. {remedy}")
    console.print(f"{path} {split}: no damage; {report}")


def find_damage(row: dict, tokenizer, widths: dict[str, int]) -> dict:
    """{"damage": what is wrong with a row of a finished data set, "" if nothing}; QUERY_DIFFERS if nothing else is.
    widths: {column of tokens: its width in the first row}."""
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
    """What is wrong with ids that should be (width,); tokens: without as many ids as there are [PAD], on the side for
    it."""
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
    """Are these what the tokenizer makes of a text, or do they decode to it? The latter have special tokens in them, or
    were sampled (alpaca_dataset.py and gold_label.py in ensembles/)."""
    end = [tokenizer.eos_token_id] if has_eos else []
    if encode(tokenizer, text.removesuffix(tokenizer.eos_token)) + end == tokens:
        return True
    return tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == text


def joined_damage(row: dict, name: str, query: list[int], ids: list[int], tokens: list[int], pad_id: int) -> str:
    """What is wrong with label and text of query + response. ids, tokens: with and without [PAD]."""
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


# ==== Hub =========================================================================================


def push(name: str, repository: str, args: Args):
    """Push a finished data set and its card; where that fails, say how to do it later."""
    folder = f"{args.output_dir}/{name}"
    revision = args.hub_revision
    later = f"load_from_disk('{folder}').push_to_hub('{repository}', revision='{revision}')"
    complete = f"the data are complete in {args.output_dir}"
    with or_fail(f"the push to {repository} failed, but {complete}; later: {later}"):
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
    """Around what goes wrong outside of the script (a damaged file, a full disk): the run ends with one message."""
    try:
        yield
    except Exception as error:  # of as many kinds as there are formats
        fail(f"{message} ({error!r:.300})")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
