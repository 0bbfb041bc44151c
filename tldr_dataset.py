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

Deliberate deviations from the paper and its code:
- A row over its width ends the run with an error; the authors' code cut such a row silently, EOS included.
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


TLDR_TEMPLATE = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"  # Detail 2: no trailing space
CNNDM_TEMPLATE = "Article:\n{article}\n\nTL;DR:\n"
CNNDM_BATCHES = ("batch0_cnndm", "cnndm0", "cnndm2")  # Detail 1
SFT_COLUMNS = ("id", "subreddit", "title", "post", "summary")  # Detail 1
PREFERENCE_COLUMNS = ("info", "summaries", "choice", "batch", "split", "extra")  # Detail 1
INFO_FIELDS = ("id", "post", "title", "subreddit", "site", "article")
RESPONSES = {"sft": ("reference_response",), "preference": ("chosen", "rejected")}
SPLITS = {"sft": ("train", "validation", "test"), "preference": ("train", "validation", "test", "validation_cnndm")}

# plain text, no markup: policies and titles are data; wide enough for the tables when the output is a file
console = Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 120)


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


# ---- raw rows ------------------------------------------------------------------------------------


def read_file(path: Path) -> list[tuple[str, dict]]:
    """Rows of one .jsonl or .parquet file, each as (where, row); `where` names file and row (for jsonl: the line)."""
    if path.suffix == ".parquet":
        with or_fail(f"{path}: not a parquet file"):
            found = pyarrow.parquet.read_table(path).to_pylist()
        return [(f"{path}, row {number}", row) for number, row in enumerate(found, 1)]
    rows = []
    with or_fail(f"{path}: not UTF-8"), open(path, encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{path}, row {number}"
                with or_fail(f"{where}: invalid JSON"):
                    rows.append((where, json.loads(line)))
                if not isinstance(rows[-1][1], dict):
                    fail(f"{where}: not a JSON object")
    return rows


def read_raw(source: str, splits: Iterable[str], required: Iterable[str]) -> dict[str, list[tuple[str, dict]]]:
    """{split: [(where, row), …]} of a folder or a Hub id; ends with an error on an empty split or a missing column."""
    folder, raw = Path(source).expanduser(), {}
    if folder.is_dir():
        for split in splits:
            found = [path for path in (folder / f"{split}.jsonl", folder / f"{split}.parquet") if path.exists()]
            if len(found) > 1:
                fail(f"{source} has both {found[0].name} and {found[1].name}: keep one")
            if found:
                raw[split] = read_file(found[0])
    else:
        repository, _, revision = source.partition("@")
        with or_fail(f"{source} is not a folder with a .jsonl or .parquet file per split, nor a data set on the Hub"):
            configs = datasets.get_dataset_config_names(repository, revision=revision or None)
            config = "comparisons" if "comparisons" in configs else None
            loaded = load_dataset(repository, config, revision=revision or None)
        for split in [split for split in splits if split in loaded]:
            raw[split] = [(f"{source} {split}, row {number}", row) for number, row in enumerate(loaded[split], 1)]
    if not raw:
        fail(f"{source} has none of the splits {', '.join(splits)}, each a .jsonl or .parquet file of that name")
    for split, rows in raw.items():
        columns = sorted(set().union(*(row for _, row in rows)))
        missing = [column for column in required if column not in columns]
        if missing:
            fail(f"{source}: {split}: {len(rows)} rows without {', '.join(missing)}; found {', '.join(columns)}")
    return raw


def is_cnndm(row: dict) -> bool:
    """Detail 1: does this raw pair compare summaries of a CNN/DM article?"""
    info = row.get("info")
    return (isinstance(info, dict) and info.get("article") is not None) or row.get("batch") in CNNDM_BATCHES


def split_off_cnndm(raw: dict[str, list[tuple[str, dict]]]) -> dict[str, list[tuple[str, dict]]]:
    """Detail 1: move the CNN/DM rows of `validation` to `validation_cnndm`, in front of the rows already there."""
    for split in raw:
        for where, row in raw[split] if split != "validation" else []:
            if is_cnndm(row) != (split == "validation_cnndm"):
                fail(f"{where}: info.article: CNN/DM rows, and no others, belong in validation_cnndm (or validation)")
    splits, validation, cnndm = dict(raw), raw.get("validation", []), raw.get("validation_cnndm", [])
    splits["validation"] = [(where, row) for where, row in validation if not is_cnndm(row)]
    splits["validation_cnndm"] = [(where, row) for where, row in validation if is_cnndm(row)] + cnndm
    return {split: splits[split] for split in SPLITS["preference"] if splits.get(split)}


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


# ---- Detail 2: queries -----------------------------------------------------------------------------


def format_query(row: dict) -> str:
    """The query text of an SFT row or a pair's `info`: CNN/DM's template if it has an article, else TL;DR's."""
    if row.get("article") is not None:
        return CNNDM_TEMPLATE.format(article=row["article"])
    return TLDR_TEMPLATE.format(subreddit=row.get("subreddit") or "", title=row["title"], post=row["post"])


def encode(tokenizer: PreTrainedTokenizerBase, text: str | list[str]) -> list:
    """Token ids of plain text, or of each of several: nothing added, and what spells a special token stays text."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


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


def truncation(row: dict, query: str) -> str:
    """How truncate_query(row, …) made `query`: "none", "newline" or "character" (at least one single character)."""
    body = row["article"] if row.get("article") is not None else row["post"]
    kept = len(body) - (len(format_query(row)) - len(query))
    return "none" if kept == len(body) else "newline" if body[kept] == "\n" else "character"


# ---- Details 3-5: tokens -----------------------------------------------------------------------------


def pad_right(tokens: list[int], pad_id: int, args: Args, limit: str, column: str) -> list[int]:
    """tokens (n,) -> (getattr(args, limit),); ValueError, by `column`, if they are longer (Detail 4)."""
    width = getattr(args, limit)
    if len(tokens) > width:
        flag = f"--{limit.replace('_', '-')}"
        raise ValueError(f"{column} has {len(tokens)} tokens, more than the limit of {width}: raise {flag}")
    return tokens + [pad_id] * (width - len(tokens))


def mask_query(query_token: list[int], tokens: list[int], pad_id: int) -> list[int]:
    """A copy of `tokens` in which the prefix that it shares with `query_token` (unpadded) is pad_id."""
    shared = len(os.path.commonprefix([query_token, tokens]))
    return [pad_id] * shared + tokens[shared:]


def query_columns(row: dict, tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict:
    """query, query_token (max_length,), query_token_len of an SFT row or a pair's `info`."""
    query, tokens = truncate_query(row, tokenizer, max_length)
    padding = [tokenizer.pad_token_id] * (max_length - len(tokens))  # Detail 5: queries are padded on the left
    return {"query": query, "query_token": padding + tokens, "query_token_len": len(tokens)}


def response_columns(
    name: str, text: str, query: dict, tokenizer: PreTrainedTokenizerBase, args: Args, limits: tuple[str, str]
) -> dict:
    """The columns of one response, `name` being reference_response, chosen or rejected. query: what `query_columns`
    returns. limits: names of the fields of `args` that hold the widths of response and of query + response."""
    pad_id, eos_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    response = text if text.startswith(" ") else f" {text}"  # Detail 3: a leading space, and EOS at the end
    # One string is tokenised, not two. strip() drops the newline that ends CNN/DM queries, as in the authors' code:
    # the width of 2021 was measured that way.
    joined = query["query"].strip() + response
    tokens, joined_tokens = encode(tokenizer, response) + [eos_id], encode(tokenizer, joined) + [eos_id]
    response_token = pad_right(tokens, pad_id, args, limits[0], f"{name}_token")  # Detail 5: padded on the right
    joined_token = pad_right(joined_tokens, pad_id, args, limits[1], f"query_{name}_token")
    query_token = query["query_token"][-query["query_token_len"] :]
    return {
        name: response + tokenizer.eos_token,
        f"{name}_token": response_token,
        f"{name}_token_len": len(tokens),
        f"query_{name}": joined + tokenizer.eos_token,
        f"query_{name}_token": joined_token,
        f"query_{name}_token_len": len(joined_tokens),
        f"query_{name}_token_response_label": mask_query(query_token, joined_token, pad_id),
    }


def process_sft_row(row: dict, tokenizer: PreTrainedTokenizerBase, args: Args) -> dict:
    """All columns of one SFT row; ValueError naming the field that is wrong."""
    columns = {"id": text_field(row, "id", "id", required=False)}
    columns["subreddit"] = text_field(row, "subreddit", "subreddit", required=False) or ""
    columns |= {field: text_field(row, field, field) for field in ("title", "post", "summary")}
    query = query_columns(columns, tokenizer, args.max_query_length)
    limits = ("max_sft_response_length", "max_sft_query_response_length")
    return columns | query | response_columns("reference_response", row["summary"], query, tokenizer, args, limits)


def process_preference_row(row: dict, tokenizer: PreTrainedTokenizerBase, args: Args) -> dict:
    """All columns of one pair; ValueError naming the field that is wrong."""
    suffix = "_cnndm" if is_cnndm(row) else ""
    info, summaries, choice, extra = row.get("info"), row.get("summaries"), row.get("choice"), row.get("extra")
    for field in ("article",) if suffix else ("title", "post"):
        text_field(info, field, f"info.{field}")
    if not isinstance(summaries, list) or len(summaries) != 2:
        raise ValueError(f"summaries should be a list of two, not {summaries!r:.80}")
    if type(choice) is not int or choice not in (0, 1):  # bool is a kind of int, but no choice
        raise ValueError(f"choice should be 0 or 1, not {choice!r:.80}")
    confidence = extra.get("confidence") if isinstance(extra, dict) else extra
    if type(confidence) not in (int, type(None)):
        raise ValueError(f"extra.confidence should be an integer or null, not {confidence!r:.80}")
    columns = {
        "id": text_field(info, "id", "info.id", required=False),
        "info": {field: text_field(info, field, f"info.{field}", required=False) for field in INFO_FIELDS},
        "summaries": [
            {k: text_field(summary, k, f"summaries[{i}].{k}", k == "text") for k in ("text", "policy", "note")}
            for i, summary in enumerate(summaries)
        ],
        "choice": choice,
        "extra": {"confidence": confidence},
        **{field: text_field(row, field, field, required=False) for field in ("worker", "batch", "split")},
    }
    query = query_columns(columns["info"], tokenizer, getattr(args, f"max_query_length{suffix}"))
    limits = (f"max_rm_response_length{suffix}", f"max_rm_query_response_length{suffix}")
    chosen, rejected = columns["summaries"][choice], columns["summaries"][1 - choice]
    columns |= query | response_columns("chosen", chosen["text"], query, tokenizer, args, limits)
    columns |= response_columns("rejected", rejected["text"], query, tokenizer, args, limits)
    columns |= {"chosen_policy": chosen["policy"], "rejected_policy": rejected["policy"]}
    return columns | {"policies": "--".join(sorted(s["policy"] or "null" for s in (chosen, rejected)))}


def column_types(name: str) -> Features:
    """Columns and types of the data set `name`."""
    text, number = Value("string"), Value("int64")
    tokens = List(number)  # of any length, as published: all splits of a DatasetDict must have the same types
    features = {column: text for column in SFT_COLUMNS}
    if name == "preference":
        features = {"id": text, "info": {field: text for field in INFO_FIELDS}}
        features |= {"summaries": List({"text": text, "policy": text, "note": text}), "choice": Value("int32")}
        features |= {"worker": text, "batch": text, "split": text, "extra": {"confidence": Value("int32")}}
    features |= {"query": text, "query_token": tokens, "query_token_len": number}
    for response in RESPONSES[name]:
        for part in (response, f"query_{response}"):
            features |= {part: text, f"{part}_token": tokens, f"{part}_token_len": number}
        features[f"query_{response}_token_response_label"] = tokens
    if name == "preference":
        features |= {"chosen_policy": text, "rejected_policy": text, "policies": text}
    return Features(features)


# ---- statistics ------------------------------------------------------------------------------------------


def policy_pair_counts(policies: Iterable[str]) -> list[tuple[str, int]]:
    """Detail 6, tables 21-27: (pair of policies, its count), the most frequent first, ties by name."""
    return sorted(Counter(policies).items(), key=lambda item: (-item[1], item[0]))


def length_statistics(name: str, data: DatasetDict) -> tuple[pd.DataFrame, Figure]:
    """Detail 4: lengths in tokens per split and column beside their limits; figures 2 and 3: their histograms."""
    columns = [column for column in data[next(iter(data))].column_names if column.endswith("_token_len")]
    figure = Figure(figsize=(4 * len(columns), 3 * len(data)), layout="constrained")
    axes, records = figure.subplots(len(data), len(columns), squeeze=False), []
    for i, (split, dataset) in enumerate(data.items()):
        for j, column in enumerate(columns):
            lengths, what = pd.Series(dataset[column][:]), column.removesuffix("_token_len")
            limit = len(dataset[0][f"{what}_token"])
            record = {"dataset": name, "split": split, "text": what, "rows": len(lengths), "min": lengths.min()}
            record |= {"median": lengths.median(), "mean": round(lengths.mean(), 1), "max": lengths.max()}
            records.append(record | {"limit": limit})
            axes[i, j].hist(lengths, bins=100, range=(0, limit))
            axes[i, j].set(title=f"{split}: {what}\nmax {lengths.max()}, limit {limit}", xlabel="tokens", ylabel="rows")
    return pd.DataFrame(records), figure


def truncation_counts(name: str, split: str, dataset: Dataset) -> dict:
    """Detail 2: how many queries of a split were cut, and how; how many had no subreddit."""
    counts, null = Counter(), 0
    for row in dataset.select_columns(["info", "query"] if name == "preference" else [*SFT_COLUMNS, "query"]):
        info = row.get("info", row)
        counts[truncation(info, row["query"])] += 1
        null += info.get("article") is None and not info["subreddit"]
    record = {"dataset": name, "split": split, "queries": len(dataset), "cut at a newline": counts["newline"]}
    return record | {"cut by characters": counts["character"], "null subreddit": null}


def card_text(name: str, args: Args, lengths: pd.DataFrame) -> str:
    """Body of the data card: where the data come from, command line, token lengths."""
    source = args.sft_dataset if name == "sft" else args.preference_dataset
    return f"""# TL;DR {name} data, pre-tokenised

Made from `{source}` with the tokenizer `{args.tokenizer}` and a `[PAD]` token added to it, after Details 1-6 of
"The N+ Implementation Details of RLHF with PPO". `query_token` is padded on the left, all other tokens on the right.
In `…_response_label` the query is replaced by the pad id.

```
{shlex.join(["python", *sys.argv])}
{lengths.drop(columns="dataset").to_string(index=False)}
```
"""


# ---- all rows in parallel; --check -------------------------------------------------------------------------


def map_rows(label: str, data: Dataset, function: Callable, features: Features, num_proc: int, folder: str) -> Dataset:
    """Dataset of function(row), rows in order, in a file of `folder`. Each process has consecutive rows and ends with
    its first error; the error of the first such process, which is the first in the order of the rows, is raised."""
    num_proc = min(num_proc, -(-len(data) // 100))  # to start a process takes as long as 100 rows
    name = re.sub(r"\W", "_", label)
    settings = {"features": features, "remove_columns": data.column_names, "new_fingerprint": name}
    settings |= {"cache_file_name": f"{folder}/{name}/rows.arrow"}  # in a fresh folder: nothing can be stale
    columns = (BarColumn(), MofNCompleteColumn(), tqdm.rich.RateColumn(" rows"), TimeRemainingColumn())
    bar = partial(tqdm.rich.tqdm, progress=("{task.description}", *columns), options={"console": console})
    with mock.patch.object(datasets.arrow_dataset, "hf_tqdm", bar):
        return data.map(function, num_proc=num_proc if num_proc > 1 else None, desc=label, **settings)


def process_split(label: str, rows: list, process: Callable, features: Features, num_proc: int, folder: str) -> Dataset:
    """Dataset of process(row) for rows [(where, row), …]; the first bad row ends the run."""

    def columns(raw: dict) -> dict:
        try:
            return process(pickle.loads(raw["row"]))
        except ValueError as error:
            raise ValueError(raw["where"], str(error)) from None

    raw = Dataset.from_list([{"where": where, "row": pickle.dumps(row)} for where, row in rows])  # of any type, if bad
    try:
        return map_rows(label, raw, columns, features, num_proc, folder)
    except ValueError as bad_row:
        where, error = (label, *bad_row.args)[-2:]
        fail(f"{where}: {error}")


def find_damage(row: dict, tokenizer: PreTrainedTokenizerBase, widths: dict[str, int]) -> dict:
    """{"damage": what is wrong with a row of a finished data set, "" if nothing, "query" if all but that `query` does
    not tokenise back to query_token}. widths: {column of tokens: its width in the first row}, query_token first."""
    pad_id, size, query, found = tokenizer.pad_token_id, len(tokenizer), None, ""
    for column, width in widths.items():
        ids, name = row[column] or [], column.removesuffix("_token")
        side, end = ("left", []) if name == "query" else ("right", [tokenizer.eos_token_id])
        tokens = ids[ids.count(pad_id) :] if name == "query" else ids[: len(ids) - ids.count(pad_id)]
        wrong = [token for token in tokens if token is None or token == pad_id or not 0 <= token < size]
        if len(ids) != width or wrong or not tokens or (end and tokens[-1:] != end):
            needed = f"{width} ids of 0 to {size - 1}, [PAD] ({pad_id}) on the {side} alone{', EOS before' * len(end)}"
            return {"damage": f"{column} needs {needed}; it has {len(ids)}, wrong {wrong[:3]}, last {tokens[-1:]}"}
        text = str(row[name])
        same = encode(tokenizer, text.removesuffix(tokenizer.eos_token)) + end == tokens
        # or else with special tokens in it, or sampled (alpaca_dataset.py and gold_label.py in ensembles/)
        same = same or tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == text
        if name == "query":
            query, found = tokens, "" if same else "query"
        elif not same:
            return {"damage": f"{column} is not what the tokenizer makes of {name}"}
        if row.get(f"{column}_len", len(tokens)) != len(tokens) and name != found:  # the authors' is that of `query`
            return {"damage": f"{column}_len is {row[f'{column}_len']}, not {len(tokens)}"}
        if f"{column}_response_label" in row:
            hidden = [len(os.path.commonprefix([query, tokens])), len(query)]  # ours, the authors'
            if row[f"{column}_response_label"] not in [[pad_id] * n + ids[n:] for n in hidden]:
                return {"damage": f"{column}_response_label is not {column} with [PAD] over the query"}
            if text != str(row["query"]).strip() + row[name.removeprefix("query_")]:
                return {"damage": f"{name} is not query and {name.removeprefix('query_')}"}
    return {"damage": found}


def check(args: Args, tokenizer: PreTrainedTokenizerBase):
    """Look at every row of a finished data set, or of both in a folder; the first damaged split ends the run."""
    remedy = f"If another tokenizer than {args.tokenizer} made it, name that with --tokenizer; else make it again"
    for path in [str(path) for name in SPLITS if (path := Path(args.check, name)).is_dir()] or [args.check]:
        name, _, revision = path.partition("@")
        with or_fail(f"--check {path}: no data set with the splits train and validation. Make it with tldr_dataset.py"):
            data = load_from_disk(path) if Path(path).exists() else load_dataset(name, revision=revision or None)
            order = {split: data[split] for split in ("train", "validation", *data)}
        for split, rows in order.items():
            place = f"--check {path}: {split}"
            kind = "preference" if any("chosen" in column for column in rows.column_names) else "sft"
            needed = [name for name in column_types(kind) if name.startswith(("query", *RESPONSES[kind]))]
            missing = [name for name in needed if name not in (*rows.column_names, "query_token_len")]
            if missing or len(rows) == 0:
                fail(f"{place} has {len(rows)} rows and lacks the columns {missing}. {remedy}")
            with or_fail(f"{place} cannot be read. {remedy}"), tempfile.TemporaryDirectory() as folder:
                widths = {name: len(rows[0][name] or []) for name in needed if name.endswith("_token")}
                function = partial(find_damage, tokenizer=tokenizer, widths=widths)
                label, features = f"{Path(path).name} {split}", Features({"damage": Value("string")})
                found = map_rows(label, rows, function, features, args.num_proc, folder)["damage"][:]
            damaged = [f"row {i}: {damage}" for i, damage in enumerate(found) if damage not in ("", "query")]
            if damaged:
                fail(f"{place}, {damaged[0]} ({len(damaged)} of {len(rows)} rows are damaged). {remedy}")
            differ = f"in {found.count('query')} of {len(rows)} rows `query` does not tokenise back to query_token"
            if 2 * found.count("query") > len(rows):
                fail(f"{place}: {differ}. {remedy}")
            console.print(f"{path} {split}: no damage; {differ}")


def main(args: Args):
    disable_progress_bars()  # of `datasets`; ours shows rate and time left
    warnings.filterwarnings("ignore", category=tqdm.TqdmExperimentalWarning)

    # ---- tokenizer -----------------------------------------------------------------------------------
    name, _, revision = args.tokenizer.partition("@")
    with or_fail(f"--tokenizer {args.tokenizer} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main", trust_remote_code=False)
    if tokenizer.eos_token is None:
        fail(f"--tokenizer {args.tokenizer} has no EOS token, which ends every response (Detail 3)")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # Detail 3: never EOS, whatever padding it had before
    if args.check:
        return check(args, tokenizer)

    # ---- read raw rows ---------------------------------------------------------------------------------
    output_dir = Path(args.output_dir)
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        fail(f"{output_dir} already holds data: remove it, or choose another --output-dir")
    if args.push_to_hub and not (args.hub_id_sft and args.hub_id_preference):
        fail("--push-to-hub needs --hub-id-sft and --hub-id-preference")
    raw = {
        "sft": read_raw(args.sft_dataset, SPLITS["sft"], SFT_COLUMNS),
        "preference": split_off_cnndm(read_raw(args.preference_dataset, SPLITS["preference"], PREFERENCE_COLUMNS)),
    }
    for name, splits in raw.items():
        found = [f"{split} {len(splits[split]) if split in splits else 'absent'}" for split in SPLITS[name]]
        console.print(f"{name} rows: {', '.join(found)}")

    # everything is written beside the output folder and renamed at the end: nothing half done is left behind
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{output_dir.name}.tmp-", dir=output_dir.parent) as folder:
        data, temporary = {}, Path(folder, "data")
        for name, function in (("sft", process_sft_row), ("preference", process_preference_row)):
            data[name], features = DatasetDict(), column_types(name)
            process = partial(function, tokenizer=tokenizer, args=args)
            for split, rows in raw[name].items():
                data[name][split] = process_split(f"{name} {split}", rows, process, features, args.num_proc, folder)
            data[name].save_to_disk(temporary / name)

        # ---- statistics ------------------------------------------------------------------------------------
        statistics, lengths, tables, unique, groups = temporary / "statistics", {}, {}, [], []
        statistics.mkdir()
        for name in data:
            lengths[name], figure = length_statistics(name, data[name])
            figure.savefig(statistics / f"lengths_{name}.png", dpi=100)  # figures 2 and 3
            (temporary / name / "README.md").write_text(card_text(name, args, lengths[name]), encoding="utf-8")
        for split, dataset in data["preference"].items():  # Detail 6, tables 21-27 and 2
            counts = [(pair.replace("--", ", "), count) for pair, count in policy_pair_counts(dataset["policies"])]
            tables[f"policy_pairs_{split}"] = pd.DataFrame(counts, columns=["policies", "count"])
            unique.append({"split": split, "unique pairs": len(counts)})
            # Detail 1: pairs per batch, split of theirs and confidence
            for column, values in dataset.flatten().select_columns(["batch", "split", "extra.confidence"])[:].items():
                found = sorted(Counter("null" if value is None else value for value in values).items(), key=str)
                groups += [{"split": split, "column": column, "value": x, "pairs": pairs} for x, pairs in found]
        tables["policy_pairs"], tables["groups"] = pd.DataFrame(unique), pd.DataFrame(groups)
        cuts = [truncation_counts(name, *split) for name in data for split in data[name].items()]
        tables |= {"truncation": pd.DataFrame(cuts), "lengths": pd.concat(lengths.values(), ignore_index=True)}
        for name, frame in tables.items():
            frame.to_csv(statistics / f"{name}.csv", index=False)
            console.print(f"\n{name}.csv, {len(frame)} rows:\n{frame.head(30).to_string(index=False)}")
        temporary.rename(output_dir)
    console.print(f"wrote {output_dir}/sft, {output_dir}/preference and {output_dir}/statistics")

    # ---- push to the Hub -----------------------------------------------------------------------------------
    if args.push_to_hub:
        for name, repository in (("sft", args.hub_id_sft), ("preference", args.hub_id_preference)):
            later = f"load_from_disk('{output_dir}/{name}').push_to_hub('{repository}', revision='{args.hub_revision}')"
            with or_fail(f"the push to {repository} failed, but the data are complete in {output_dir}; later: {later}"):
                load_from_disk(f"{output_dir}/{name}").push_to_hub(repository, revision=args.hub_revision)
                pushed = {"repo_id": repository, "repo_type": "dataset", "revision": args.hub_revision}
                card = DatasetCard.load(hf_hub_download(filename="README.md", **pushed))
                card.text = Path(output_dir, name, "README.md").read_text(encoding="utf-8")
                HfApi().upload_file(path_or_fileobj=str(card).encode(), path_in_repo="README.md", **pushed)
            console.print(f"pushed {name} to {repository}@{args.hub_revision}")


if __name__ == "__main__":
    main(tyro.cli(Args))
