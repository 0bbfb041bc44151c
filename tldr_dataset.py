"""Turn raw TL;DR posts and comparisons into pre-tokenised data sets, with length statistics and plots (Details 1-6).

    # paper scale: both published data sets, from the Hub
    python tldr_dataset.py --output-dir data/tldr
    # from local folders with train|validation|test|validation_cnndm.jsonl (or .parquet)
    python tldr_dataset.py --sft-dataset raw/posts --preference-dataset raw/comparisons --tokenizer raw/tokenizer
    python tldr_dataset.py --push-to-hub --hub-id-sft me/tldr-sft --hub-id-preference me/tldr-preference

This writes OUTPUT_DIR/sft and OUTPUT_DIR/preference (`datasets.load_from_disk`) and OUTPUT_DIR/statistics (CSV, PNG).
The data sets have the columns of the published vwxyzjn/…_oai_preprocessing_1706381144 ones, and are identical for any
number of processes. To check an existing data set for damage, use eval/check_data.py.

Terms: a query is a post (or a CNN/DM article) in its template. A response is a summary with a leading space and EOS.
`X_token` holds the token ids of the text `X`, padded to a fixed width, and `X_token_len` counts them without [PAD].
`info` is the post of a raw pair. `where` names a raw row's file and number in messages.

The script deviates from the paper and the authors' code on purpose:
- If a row is longer than its width, the run ends with an error that names the row. The authors' code silently cuts
  such rows, EOS included.
- A response's tokens are those that follow the query in the joined row. Pythia's tokenizer gives the same ones to the
  response alone, as in the authors' code, but one that puts a space before every text (Llama 2's) does not.
- Nothing is added to a text. If the tokenizer would add a BOS, a line is printed that says that no row has it.
- The response label hides the tokens that query and query + response share, not the first `query_token_len` ones.
  CNN/DM queries end in a newline that is lost on joining, so counting would also hide a token of the response.
- Text that happens to spell `<|endoftext|>` or `[PAD]` is tokenised as plain text, so only our own EOS ends a response.
- `query` is the formatted text. The authors stored decode(query_token), and their tokenizer dropped the space before
  punctuation. `query_token` and the responses' tokens are the same in both. In 4.7 % of the rows, `query_…_token` and
  its label differ, because both scripts make them from the text of `query`.
- CNN/DM pairs are recognised by their article as well as by their batch.
- A missing subreddit becomes "", and a missing policy counts as the policy "null". The real pairs have both.
- `validation_cnndm` rows keep the order of the file, and ties in the policy tables are ordered by name.
"""

import json
import os
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path

os.environ["MPLBACKEND"] = "agg"  # the backend that a notebook chooses may not be installed here

import pandas as pd
import pyarrow.parquet
import tyro
from datasets import Dataset, DatasetDict, Features, List, Value, load_dataset, load_from_disk
from huggingface_hub import DatasetCard, HfApi, hf_hub_download
from matplotlib.figure import Figure
from transformers import AutoTokenizer, PreTrainedTokenizerBase

TLDR_TEMPLATE = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"  # Detail 2: no trailing space
CNNDM_TEMPLATE = "Article:\n{article}\n\nTL;DR:\n"
CNNDM_BATCHES = ("batch0_cnndm", "cnndm0", "cnndm2")  # Detail 1
SFT_COLUMNS = ("id", "subreddit", "title", "post", "summary")  # Detail 1
PREFERENCE_COLUMNS = ("info", "summaries", "choice", "batch", "split", "extra")  # Detail 1
INFO_FIELDS = ("id", "post", "title", "subreddit", "site", "article")
MAX_QUERY_LENGTH_CNNDM = 1919  # 2047 - 128, as in OpenAI's code
# (width of query, width of response): width of both together, as the paper measured it (Detail 5)
MEASURED_WIDTHS = {(512, 53): 562, (512, 169): 638, (MAX_QUERY_LENGTH_CNNDM, 155): 2021}
RESPONSES = {"sft": ("reference_response",), "preference": ("chosen", "rejected")}
SFT_SPLITS = ("train", "validation", "test")
# where the rows of a raw split go (TL;DR, CNN/DM); None: no such row may be there (Detail 1)
PREFERENCE_TARGETS = {
    "train": ("train", None),
    "validation": ("validation", "validation_cnndm"),
    "test": ("test", None),
    "validation_cnndm": (None, "validation_cnndm"),
}
# the paper's numbers of the published data sets: (data set, split, text, number) (section 4, Detail 4, table 2)
PAPER = {
    ("sft", "train", "reference_response", "rows"): 116_722,
    ("preference", "train", "chosen", "rows"): 92_858,
    ("preference", "train", "chosen", "median"): 32,
    ("preference", "train", "rejected", "median"): 30,
    ("preference", "train", "policies", "unique pairs"): 47,
    ("preference", "validation", "policies", "unique pairs"): 241,
    ("preference", "validation_cnndm", "policies", "unique pairs"): 7,
}
# the main branch has only a script, which `datasets` does not run any more; this one is the Hub's own conversion
CONVERTED = {"openai/summarize_from_feedback": "refs/convert/parquet"}
RawRows = list[tuple[str, dict]]  # [(where, row), …]


@dataclass
class Args:
    sft_dataset: str = "vwxyzjn/summarize_from_feedback_tldr_3_filtered"
    """posts with reference summaries (Detail 1): a Hub id (`@revision` allowed) or a folder of jsonl/parquet files"""
    preference_dataset: str = "openai/summarize_from_feedback"
    """pairs of summaries with a choice (Detail 1): a Hub id (its folder `comparisons`) or a folder"""
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
    max_rm_response_length_cnndm: int = 155
    """the same for summaries of CNN/DM articles"""

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
    """Return the query text of an SFT row or a pair's `info`."""
    if row.get("article") is not None:
        return CNNDM_TEMPLATE.format(article=row["article"])
    return TLDR_TEMPLATE.format(subreddit=row.get("subreddit") or "", title=row["title"], post=row["post"])


def truncate_query(row: dict, tokenizer: PreTrainedTokenizerBase, max_length: int) -> tuple[str, list[int]]:
    """Return (query text, its token ids) with at most max_length tokens (Detail 2).

    While the query is too long, its post (or CNN/DM article) is cut before its last newline or, if it has none left,
    loses its last character. Template and title stay whole. Raises ValueError if even an empty post does not fit."""
    field = "article" if row.get("article") is not None else "post"
    body = row[field]
    query = format_query(row)
    tokens = encode(tokenizer, query)
    while len(tokens) > max_length:
        if not body:
            raise ValueError(f"{field}: the query has {len(tokens)} tokens without it, more than {max_length}")
        if "\n" in body:
            body = body[: body.rfind("\n")]
        else:
            # Single steps would be slow in a long line. A character has at most 4 tokens, so a quarter of the excess
            # can go at once with the same result; the last 32 tokens still go by single characters.
            excess = len(tokens) - max_length
            body = body[: -max(1, (excess - 32) // 4)]
        query = format_query({**row, field: body})
        tokens = encode(tokenizer, query)
    return query, tokens


def encode(tokenizer: PreTrainedTokenizerBase, text: str | list[str]) -> list:
    """Return the token ids of a text, or of each text of a list, without adding any. Special tokens are plain text."""
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


def response_columns(name: str, text: str, query: dict, tokenizer, widths: tuple[int, int, int]) -> dict:
    """Return the columns of a response. `query` and `widths` are what query_columns and widths_of return."""
    pad_id = tokenizer.pad_token_id
    response = text if text.startswith(" ") else f" {text}"  # Detail 3: a leading space, and EOS at the end
    # Query and response are tokenised as one string. strip() drops the newline that ends CNN/DM queries, as in the
    # authors' code, which measured the width of 2021 that way.
    joined = query["query"].strip() + response
    joined_tokens = encode(tokenizer, joined) + [tokenizer.eos_token_id]
    query_token = query["query_token"][-query["query_token_len"] :]  # without [PAD]
    # The two strings share these tokens, usually the whole query. What follows counts as the response.
    shared = len(os.path.commonprefix([query_token, joined_tokens]))
    texts = (response + tokenizer.eos_token, joined + tokenizer.eos_token)
    return padded_columns(name, texts, joined_tokens[:shared], joined_tokens[shared:], pad_id, widths)


def padded_columns(
    name: str, texts: tuple[str, str], query: list[int], response: list[int], pad_id: int, widths: tuple[int, int, int]
) -> dict:
    """Return the columns of a response: its text and that of query and response, and the tokens of both, of which the
    label has the response's. `widths` are those of query, response, and both."""
    _, response_width, joined_width = widths
    return {
        name: texts[0],
        f"{name}_token": pad_right(response, pad_id, response_width),
        f"{name}_token_len": len(response),
        f"query_{name}": texts[1],
        f"query_{name}_token": pad_right(query + response, pad_id, joined_width),
        f"query_{name}_token_len": len(query + response),
        f"query_{name}_token_response_label": pad_right([pad_id] * len(query) + response, pad_id, joined_width),
    }


def pad_right(tokens: list[int], pad_id: int, width: int) -> list[int]:
    """Return tokens (n,) padded on the right to (width,) (Detail 5). Longer ones stay, for check_widths to find."""
    return tokens + [pad_id] * (width - len(tokens))


def widths_of(args: Args, name: str, cnndm: bool) -> tuple[int, int, int]:
    """Return the widths of query, response, and query + response in the data set `name` (Details 4 and 5)."""
    query = args.max_query_length
    response = args.max_sft_response_length if name == "sft" else args.max_rm_response_length
    if cnndm:
        query = MAX_QUERY_LENGTH_CNNDM
        response = args.max_rm_response_length_cnndm
    return query, response, MEASURED_WIDTHS.get((query, response), query + response)


def process_sft_row(row: dict, tokenizer, args: Args) -> dict:
    """Return all columns of an SFT row, from its fields as post_fields returns them."""
    columns = dict(row)
    widths = widths_of(args, "sft", cnndm=False)
    query = query_columns(columns, tokenizer, widths[0])
    columns |= query
    columns |= response_columns("reference_response", columns["summary"], query, tokenizer, widths)
    return columns


def process_preference_row(row: dict, tokenizer, args: Args) -> dict:
    """Return all columns of a pair, from its fields as pair_fields returns them."""
    columns = dict(row)
    widths = widths_of(args, "preference", is_cnndm(row))
    query = query_columns(columns["info"], tokenizer, widths[0])
    columns |= query
    chosen = columns["summaries"][columns["choice"]]
    rejected = columns["summaries"][1 - columns["choice"]]
    for name, summary in (("chosen", chosen), ("rejected", rejected)):
        columns |= response_columns(name, summary["text"], query, tokenizer, widths)
        columns[f"{name}_policy"] = summary["policy"]
    policies = [chosen["policy"] or "null", rejected["policy"] or "null"]
    columns["policies"] = "--".join(sorted(policies))  # Detail 6: (a, b) and (b, a) are one pair
    return columns


# ==== main ========================================================================================


def main(args: Args):
    # ---- 1. tokenizer ----------------------------------------------------------------------------
    name, _, revision = args.tokenizer.partition("@")
    name = args.tokenizer if Path(args.tokenizer).exists() else name  # a local path may contain an @
    with or_fail(f"--tokenizer {args.tokenizer} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main", trust_remote_code=False)
    if tokenizer.eos_token is None:
        fail(f"--tokenizer {args.tokenizer} has no EOS token to end responses with (Detail 3)")
    if max(tokenizer.get_vocab().values()) != len(tokenizer) - 1:
        fail(f"--tokenizer {args.tokenizer} leaves ids out, so [PAD] would get another token's id")
    added = tokenizer.convert_ids_to_tokens(tokenizer("")["input_ids"])
    if added:
        print(f"--tokenizer {args.tokenizer} adds {' '.join(added)} to a text; no row here has it")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # Detail 3: never EOS, whatever padding it had before

    # ---- 2. raw rows -----------------------------------------------------------------------------
    output_dir = Path(args.output_dir).expanduser()
    args.output_dir = str(output_dir)
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        fail(f"{output_dir} already holds data: remove it, or choose another --output-dir")
    if args.push_to_hub and not (args.hub_id_sft and args.hub_id_preference):
        fail("--push-to-hub needs --hub-id-sft and --hub-id-preference")
    posts = read_raw(args.sft_dataset, SFT_SPLITS, SFT_COLUMNS)
    pairs = read_raw(args.preference_dataset, PREFERENCE_TARGETS, PREFERENCE_COLUMNS)
    raw = {"sft": posts, "preference": split_off_cnndm(pairs)}

    with unfinished_folder(output_dir) as folder:
        # ---- 3. columns of every row -------------------------------------------------------------
        data = {}
        for name, splits in raw.items():
            data[name] = DatasetDict()
            for split, rows in splits.items():
                data[name][split] = process_split(name, split, rows, tokenizer, args, folder)
                check_widths(name, split, rows, data[name][split], args)
            data[name].save_to_disk(folder / "finished" / name)

        # ---- 4. statistics -----------------------------------------------------------------------
        write_statistics(args, data, folder / "finished")
    print(f"wrote sft, preference and statistics to {output_dir}")

    # ---- 5. Hub ----------------------------------------------------------------------------------
    if args.push_to_hub:
        push("sft", args.hub_id_sft, args)
        push("preference", args.hub_id_preference, args)


# ==== raw rows ====================================================================================


def read_raw(source: str, splits: Iterable[str], required: tuple[str, ...]) -> dict[str, RawRows]:
    """Return {split: rows} of a folder or a Hub id, and print which splits are absent and which files of the folder are
    not read. Ends with an error if a split is empty or a column is missing."""
    folder = Path(source).expanduser()
    raw = {} if folder.is_dir() else read_hub(source, splits)
    for split in splits:
        for path in (folder / f"{split}.jsonl", folder / f"{split}.parquet"):
            if path.exists() and split in raw:
                fail(f"{source} has both {split}.jsonl and {path.name}: keep one")
            if path.exists():
                raw[split] = read_file(path)
    if not raw:
        fail(f"{source} has none of the splits {', '.join(splits)} as .jsonl or .parquet")
    absent = [split for split in splits if split not in raw]
    others = [path.name for path in sorted(folder.glob("*.*")) if path.stem not in splits]
    others = [name for name in others if name.endswith((".jsonl", ".parquet"))]
    if absent or others:
        print(f"{source}: absent splits: {', '.join(absent) or 'none'}; files not read: {', '.join(others) or 'none'}")
    for split, rows in raw.items():
        missing = set(required) - {column for _, row in rows for column in row}  # all, if there are no rows
        if missing:
            how = ""
            if "summaries" in missing:
                how = " (pairs with prompt, chosen and rejected: llama2/preference_dataset.py)"
            fail(f"{source}: {split}: {len(rows)} rows without {', '.join(sorted(missing))}{how}")
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
    """Return {split: rows} for those of the splits that a Hub id[@revision] has, in its folder `comparisons` if there
    is one."""
    repository, _, revision = source.partition("@")
    revision = revision or CONVERTED.get(repository)
    with or_fail(f"{source} is not a folder, and cannot be loaded from the Hub"):
        files = HfApi().list_repo_files(repository, revision=revision, repo_type="dataset")
        folder = "comparisons" if any(name.startswith("comparisons/") for name in files) else None
        loaded = load_dataset(repository, data_dir=folder, revision=revision)
    raw = {}
    for split in splits:
        if split in loaded:
            raw[split] = [(f"{source} {split}, row {number}", row) for number, row in enumerate(loaded[split], 1)]
    return raw


def split_off_cnndm(raw: dict[str, RawRows]) -> dict[str, RawRows]:
    """Move the CNN/DM rows of `validation` to `validation_cnndm`, before the rows already there (Detail 1)."""
    splits = {split: [] for split in PREFERENCE_TARGETS}
    for split, rows in raw.items():
        for where, row in rows:
            tldr, cnndm = PREFERENCE_TARGETS[split]
            target = cnndm if is_cnndm(row) else tldr
            if target is None:
                kind = "a CNN/DM row" if is_cnndm(row) else "not a CNN/DM row"
                fail(f"{where}: {kind}. CNN/DM rows belong in validation or validation_cnndm, and all others elsewhere")
            splits[target].append((where, row))
    return {split: rows for split, rows in splits.items() if rows}


def is_cnndm(row: dict) -> bool:
    """Return whether a raw pair compares summaries of a CNN/DM article (Detail 1)."""
    info = row.get("info")
    return row.get("batch") in CNNDM_BATCHES or (isinstance(info, dict) and info.get("article") is not None)


def post_fields(row: dict) -> dict:
    """Return the columns of an SFT row that are stored unchanged. Raises ValueError naming a field that is wrong."""
    columns = {}
    for field in SFT_COLUMNS:
        columns[field] = text_field(row, field, field, required=field != "subreddit")
    columns["subreddit"] = columns["subreddit"] or ""
    return columns


def pair_fields(row: dict) -> dict:
    """Return the columns of a pair that are stored unchanged. Raises ValueError naming a field that is wrong."""
    info = row.get("info")
    summaries = row.get("summaries")
    choice = row.get("choice")
    extra = row.get("extra")
    if not isinstance(summaries, list) or len(summaries) != 2:
        raise ValueError(f"summaries should be a list of two, not {summaries!r:.80}")
    if type(choice) is not int or choice not in (0, 1):  # True is an int, but not a choice
        raise ValueError(f"choice should be 0 or 1, not {choice!r:.80}")
    confidence = extra.get("confidence") if isinstance(extra, dict) else extra
    if type(confidence) not in (int, type(None)):
        raise ValueError(f"extra.confidence should be an integer or null, not {confidence!r:.80}")
    columns = {"info": {}, "summaries": [{}, {}], "choice": choice}
    columns["extra"] = {"confidence": confidence}
    needed = ("article",) if is_cnndm(row) else ("title", "post")
    for field in INFO_FIELDS:
        columns["info"][field] = text_field(info, field, f"info.{field}", required=field in needed)
    for i, summary in enumerate(summaries):
        for field in ("text", "policy", "note"):
            text = text_field(summary, field, f"summaries[{i}].{field}", required=field == "text")
            columns["summaries"][i][field] = text
    for field in ("worker", "batch", "split"):
        columns[field] = text_field(row, field, field, required=False)
    columns["id"] = columns["info"]["id"]
    return columns


def text_field(record: dict, field: str, name: str, required: bool = True) -> str | None:
    """Return record[field]: text that is blank or null only if not `required`. Raises ValueError with `name`."""
    value = record.get(field) if isinstance(record, dict) else None
    if value is None and not required:
        return None
    if not isinstance(value, str):
        raise ValueError(f"{name} should be text, not {value!r:.80}")
    if required and not value.strip():
        raise ValueError(f"{name} is empty")
    value.encode()  # half a surrogate pair raises UnicodeEncodeError, which is a ValueError
    return value


def column_types(name: str) -> Features:
    """Return the columns of the data set `name` and their types."""
    text = Value("string")
    number = Value("int64")
    tokens = List(number)  # of any length, as published: all splits of a DatasetDict must have one type
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
    if name == "sft":
        check_fields = post_fields
        process_row = process_sft_row
    else:
        check_fields = pair_fields
        process_row = process_preference_row
    checked = []  # so that a wrong row ends the run before any work, and all rows have the same types
    for where, row in rows:
        try:
            checked.append({"where": where} | check_fields(row))
        except ValueError as error:
            fail(f"{where}: {error}")
    types = column_types(name)
    stored = {column: types[column] for column in types if column in checked[0]}

    def process(row: dict) -> dict:
        fields = {column: row[column] for column in stored}
        try:
            return process_row(fields, tokenizer, args)
        except ValueError as error:
            raise ValueError(f"{row['where']}: {error}") from None

    num_proc = min(args.num_proc, ceil(len(rows) / 100))  # starting a process takes as long as 100 rows
    if num_proc == 1:
        num_proc = None  # datasets would start a process for 1
    settings = {"num_proc": num_proc, "desc": f"{name} {split}"}
    settings["new_fingerprint"] = f"{name}_{split}"  # the same for any number of processes
    settings["cache_file_name"] = f"{folder}/{name}_{split}/rows.arrow"  # a fresh folder, so nothing is stale
    try:
        data = Dataset.from_list(checked, features=Features({"where": Value("string")} | stored))
        return data.map(process, features=types, remove_columns=["where"], **settings)
    except ValueError as error:
        fail(str(error))


def check_widths(name: str, split: str, rows: RawRows, data: Dataset, args: Args):
    """End with an error that names the longest row of a split if it is longer than its width (Detail 4)."""
    flag = "--max-sft-response-length" if name == "sft" else "--max-rm-response-length"
    if split == "validation_cnndm":
        flag += "-cnndm"
    _, response_width, joined_width = widths_of(args, name, split == "validation_cnndm")
    for response in RESPONSES[name]:
        for column, width in ((response, response_width), (f"query_{response}", joined_width)):
            lengths = data[f"{column}_token_len"][:]
            longest = max(lengths)
            if longest > width:
                where, _ = rows[lengths.index(longest)]
                fail(
                    f"{where}: {column} has {longest} tokens but a width of {width}; raise {flag} by {longest - width}"
                )


@contextmanager
def unfinished_folder(output_dir: Path):
    """Yield a temporary folder, and rename its subfolder `finished` to output_dir at the end if nothing fails."""
    target = output_dir.resolve()  # of a symlink, so that it stays one
    if target.is_mount() or target == Path.cwd():
        fail(f"{output_dir} cannot be replaced: choose a folder in it")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.tmp-", dir=target.parent) as folder:
        yield Path(folder)
        Path(folder, "finished").rename(target)  # replaces an empty folder


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
        Path(folder, name, "README.md").write_text(card_text(name, args, table), encoding="utf-8")
    tables = pair_tables(data["preference"])
    tables["lengths"] = pd.concat(lengths, ignore_index=True)
    beside = beside_paper(args, tables["lengths"], tables["policy_pairs"])
    if len(beside):
        tables["paper"] = beside
    for name, table in tables.items():
        table.to_csv(statistics / f"{name}.csv", index=False)
        print(f"\n{name}.csv, {len(table)} rows:\n{table.head(30).to_string(index=False)}")


def length_statistics(name: str, data: DatasetDict) -> tuple[pd.DataFrame, Figure]:
    """Return lengths in tokens per split and column (Detail 4), and their histograms (figures 2 and 3)."""
    first = next(iter(data.values()))
    columns = [column for column in first.column_names if column.endswith("_token_len")]
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
            title = f"{split}: {text}\nmax {record['max']}, limit {limit}"
            plots[i, j].hist(lengths, bins=100, range=(0, limit), histtype="stepfilled")
            plots[i, j].set(title=title, xlabel="tokens", ylabel="rows")
    return pd.DataFrame(records), figure


def pair_tables(pairs: DatasetDict) -> dict[str, pd.DataFrame]:
    """Return {name: table}: tables 21-27 and 2 (Detail 6), and pairs per batch, split and confidence (Detail 1)."""
    tables = {}
    unique = []
    groups = []
    for split, dataset in pairs.items():
        counts = Counter(dataset["policies"]).items()
        counts = sorted(counts, key=lambda item: (-item[1], item[0]))  # the most frequent first, ties by name
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


def beside_paper(args: Args, lengths: pd.DataFrame, policy_pairs: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's numbers beside those of the published data sets that were read, and whether they agree.
    lengths, policy_pairs: tables of length_statistics and pair_tables."""
    sources = {"sft": args.sft_dataset, "preference": args.preference_dataset}
    pairs = policy_pairs.assign(dataset="preference", text="policies")
    found = pd.concat([lengths, pairs]).set_index(["dataset", "split", "text"])
    records = []
    for (name, split, text, number), paper in PAPER.items():
        is_published = sources[name].partition("@")[0] == getattr(Args, f"{name}_dataset")
        if is_published and (name, split, text) in found.index:
            here = found.loc[(name, split, text), number]
            verdict = "as in the paper" if here == paper else "differs from the paper"
            records.append({"dataset": name, "split": split, "text": text, "number": number, "paper": paper})
            records[-1] |= {"here": here, "": verdict}
    return pd.DataFrame(records)


def card_text(name: str, args: Args, lengths: pd.DataFrame) -> str:
    """Return the body of the data card: where the data come from, the command line, and token lengths."""
    source = args.sft_dataset if name == "sft" else args.preference_dataset
    table = lengths.drop(columns="dataset").to_string(index=False)
    return f"""# TL;DR {name} data, pre-tokenised

Made from `{source}` with the tokenizer `{args.tokenizer}` and a `[PAD]` token added to it, after Details 1-6 of
"The N+ Implementation Details of RLHF with PPO". `query_token` is padded on the left, all other tokens on the right.
In `…_response_label` the query is replaced by the pad id.

```
{shlex.join(["python", *sys.argv])}
{table}
```
"""


# ==== Hub and errors ==============================================================================


def push(name: str, repository: str, args: Args):
    """Push a finished data set and its card. If that fails, the error says how to do it later."""
    folder = f"{args.output_dir}/{name}"
    revision = args.hub_revision
    later = f"load_from_disk('{folder}').push_to_hub('{repository}', revision='{revision}')"
    with or_fail(f"the push to {repository} failed; the data are complete, push later with {later}"):
        load_from_disk(folder).push_to_hub(repository, revision=revision)
        file = {"repo_id": repository, "repo_type": "dataset", "revision": revision}
        card = DatasetCard.load(hf_hub_download(filename="README.md", **file))
        card.text = Path(folder, "README.md").read_text(encoding="utf-8")
        HfApi().upload_file(path_or_fileobj=str(card).encode(), path_in_repo="README.md", **file)
    print(f"pushed {name} to {repository}@{revision}")


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
