"""Raw TL;DR posts and comparisons -> pre-tokenised data sets, with length statistics and plots (Details 1-6).

    # paper scale: both published data sets, from the Hub
    python tldr_dataset.py --output-dir data/tldr
    # from local folders with train|validation|test|validation_cnndm.jsonl (or .parquet)
    python tldr_dataset.py --sft-dataset raw/posts --preference-dataset raw/comparisons --tokenizer raw/tokenizer
    # and publish the result
    python tldr_dataset.py --push-to-hub --hub-id-sft me/tldr-sft --hub-id-preference me/tldr-preference

Writes OUTPUT_DIR/sft and OUTPUT_DIR/preference (`datasets.load_from_disk`) and OUTPUT_DIR/statistics (CSV, PNG).
One process; the columns are those of the published vwxyzjn/…_oai_preprocessing_1706381144 data sets.

Deliberate deviations from the paper and its code:
- A row over its width ends the run with an error; the authors' code cut such a row silently, EOS included.
- The response label hides the tokens that query and query+response share, not the first `query_token_len` ones:
  after CNN/DM queries (they end in a newline, which the join drops) the latter also hides a token of the response.
- Text that happens to spell `<|endoftext|>` or `[PAD]` is tokenised as plain text: only our own EOS ends a response.
- `query` is the formatted text, not its tokens decoded again; the tokens are the same.
- CNN/DM pairs are recognised by their article as well as by their batch.
- A missing subreddit or policy (real pairs have both) becomes "" and "null", and is counted.
- `validation_cnndm` rows and ties in the policy tables keep a fixed order: file order, then name.
"""

import bisect
import json
import os
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import pyarrow.parquet
import tyro
from datasets import Dataset, DatasetDict, Features, List, Value, disable_progress_bars, load_dataset
from datasets import get_dataset_config_names as config_names
from huggingface_hub import DatasetCard, HfApi, hf_hub_download
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
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
# graded preferences, passed through
OPTIONAL_COLUMNS = {"sft": ("tag",), "preference": ("margin", "grade", "tag")}
SPLITS = {"sft": ("train", "validation", "test"), "preference": ("train", "validation", "test", "validation_cnndm")}

# plain text, no markup: policies and titles are data; wide enough for the tables when the output is a file
console = Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 120)


def fail(message: str):
    """End the process with one clear message on standard error and exit code 1."""
    raise SystemExit(f"error: {message}")


def one_line(error: Exception) -> str:
    """Kind and first line of an exception."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


# ---- raw rows ------------------------------------------------------------------------------------


def read_file(path: Path) -> list[tuple[str, dict]]:
    """Rows of one .jsonl or .parquet file, each as (where, row); `where` names file and row (for jsonl: the line)."""
    if path.suffix == ".parquet":
        try:
            table = pyarrow.parquet.read_table(path)
        except (OSError, ValueError) as error:
            fail(f"{path}: not a parquet file ({one_line(error)})")
        return [(f"{path}, row {number}", row) for number, row in enumerate(table.to_pylist(), 1)]
    rows = []
    with open(path, encoding="utf-8-sig", newline="\n") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    rows.append((f"{path}, row {number}", json.loads(line)))
                    if not isinstance(rows[-1][1], dict):
                        fail(f"{path}, row {number}: not a JSON object")
        except UnicodeDecodeError as error:
            fail(f"{path}: not UTF-8 ({error})")
        except json.JSONDecodeError as error:
            fail(f"{path}, row {number}: invalid JSON ({error})")
    return rows


def read_raw(source: str, splits: Iterable[str], required: Iterable[str]) -> dict[str, list[tuple[str, dict]]]:
    """{split: [(where, row), …]} of a folder or a Hub id; ends with an error on an empty split or a missing column."""
    folder = Path(source).expanduser()
    raw, files = {}, {}
    if folder.is_dir():
        for split in splits:
            found = [path for path in (folder / f"{split}.jsonl", folder / f"{split}.parquet") if path.exists()]
            if len(found) > 1:
                fail(f"{source} has both {found[0].name} and {found[1].name}: keep one")
            if found:
                raw[split], files[split] = read_file(found[0]), found[0]
        if not raw:
            fail(f"{source} has none of the files {', '.join(f'{split}.jsonl (or .parquet)' for split in splits)}")
    elif folder.exists() or source.startswith(("/", ".", "~")):
        fail(f"{source} is not a folder; it should hold one .jsonl or .parquet file per split")
    else:
        repository, _, revision = source.partition("@")
        try:
            configs = config_names(repository, revision=revision or None)
            config = "comparisons" if "comparisons" in configs else None
            loaded = load_dataset(repository, config, revision=revision or None)
        except Exception as error:  # the Hub client raises many kinds; all of them mean: no data
            fail(f"{source} is not a folder, and could not be loaded from the Hub ({one_line(error)})")
        for split in [split for split in splits if split in loaded]:
            raw[split] = [(f"{source} {split}, row {number}", row) for number, row in enumerate(loaded[split], 1)]
            files[split] = f"{source} {split}"
        if not raw:
            fail(f"{source} has none of the splits {', '.join(splits)}; found {', '.join(loaded)}")
    for split, rows in raw.items():
        if not rows:
            fail(f"{files[split]} is empty; remove the file to leave the split out")
        columns = sorted(set().union(*(row for _, row in rows)))
        missing = [column for column in required if column not in columns]
        if missing:
            fail(f"{files[split]} has no column {', '.join(missing)}; found {', '.join(columns)}")
    return raw


def is_cnndm(row: dict) -> bool:
    """Detail 1: does this raw pair compare summaries of a CNN/DM article?"""
    info = row.get("info")
    return (isinstance(info, dict) and info.get("article") is not None) or row.get("batch") in CNNDM_BATCHES


def split_off_cnndm(raw: dict[str, list[tuple[str, dict]]]) -> dict[str, list[tuple[str, dict]]]:
    """Detail 1: move the CNN/DM rows of `validation` to `validation_cnndm`, in front of the rows already there."""
    splits = {split: rows for split, rows in raw.items() if split not in ("validation", "validation_cnndm")}
    for split, rows in splits.items():
        for where, row in rows:
            if is_cnndm(row):
                fail(f"{where}: info.article: a CNN/DM row in {split}; they belong in validation or validation_cnndm")
    validation, cnndm = raw.get("validation", []), raw.get("validation_cnndm", [])
    for where, row in cnndm:
        if not is_cnndm(row):
            fail(f"{where}: info.article: a validation_cnndm row needs an article")
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
        flag = limit.replace("_", "-")
        raise ValueError(f"{column} has {len(tokens)} tokens, more than the limit of {width}: raise --{flag}")
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
    """The columns of one response, `name` being reference_response, chosen or rejected.

    query: the three columns of `query_columns`.
    limits: names of the fields of `args` that hold the widths of response and of query + response.
    """
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
    columns |= {column: text_field(row, column, column) for column in OPTIONAL_COLUMNS["sft"] if row.get(column)}
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
            {
                "text": text_field(summary, "text", f"summaries[{i}].text"),
                "policy": text_field(summary, "policy", f"summaries[{i}].policy", required=False),
                "note": text_field(summary, "note", f"summaries[{i}].note", required=False),
            }
            for i, summary in enumerate(summaries)
        ],
        "choice": choice,
        "extra": {"confidence": confidence},
        **{field: text_field(row, field, field, required=False) for field in ("worker", "batch", "split")},
    }
    for column in [column for column in OPTIONAL_COLUMNS["preference"] if column in row]:
        if type(row[column]) not in (int, float, str, type(None)):
            raise ValueError(f"{column} should be a number or text, not {row[column]!r:.80}")
        columns[column] = row[column]
    query = query_columns(columns["info"], tokenizer, getattr(args, f"max_query_length{suffix}"))
    limits = (f"max_rm_response_length{suffix}", f"max_rm_query_response_length{suffix}")
    chosen, rejected = columns["summaries"][choice], columns["summaries"][1 - choice]
    columns |= query | response_columns("chosen", chosen["text"], query, tokenizer, args, limits)
    columns |= response_columns("rejected", rejected["text"], query, tokenizer, args, limits)
    columns |= {"chosen_policy": chosen["policy"], "rejected_policy": rejected["policy"]}
    return columns | {"policies": "--".join(sorted(s["policy"] or "null" for s in (chosen, rejected)))}


def column_types(name: str, raw: dict[str, list[tuple[str, dict]]]) -> Features:
    """Columns and types of the data set `name`; those of OPTIONAL_COLUMNS that some raw row has are part of it."""
    text, number = Value("string"), Value("int64")
    tokens = List(number)  # of any length, as published: all splits of a DatasetDict must have the same types
    features = {column: text for column in SFT_COLUMNS}
    if name == "preference":
        features = {"id": text, "info": {field: text for field in INFO_FIELDS}}
        features |= {"summaries": List({"text": text, "policy": text, "note": text}), "choice": Value("int32")}
        features |= {"worker": text, "batch": text, "split": text, "extra": {"confidence": Value("int32")}}
    for column in OPTIONAL_COLUMNS[name]:
        kinds = {type(row.get(column)) for rows in raw.values() for _, row in rows} - {type(None)}
        if str in kinds and len(kinds) > 1:
            fail(f"column {column} holds both numbers and texts")
        if kinds:
            features[column] = text if kinds == {str} else number if kinds == {int} else Value("float64")
    features |= {"query": text, "query_token": tokens, "query_token_len": number}
    for response in ("reference_response",) if name == "sft" else ("chosen", "rejected"):
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


def length_statistics(name: str, data: DatasetDict, args: Args) -> tuple[pd.DataFrame, Figure]:
    """Detail 4: lengths in tokens per split and column beside their limits; figures 2 and 3: their histograms."""
    columns = [column for column in data[next(iter(data))].column_names if column.endswith("_token_len")]
    figure = Figure(figsize=(4 * len(columns), 3 * len(data)), layout="constrained")
    axes, records = figure.subplots(len(data), len(columns), squeeze=False), []
    for i, (split, dataset) in enumerate(data.items()):
        frame = dataset.select_columns(columns).to_pandas()
        for j, column in enumerate(columns):
            part = "query" if column == "query_token_len" else "query_response" if "query_" in column else "response"
            stage = "" if part == "query" else "sft_" if name == "sft" else "rm_"
            limit = getattr(args, f"max_{stage}{part}_length{'_cnndm' if split == 'validation_cnndm' else ''}")
            lengths, what = frame[column], column.removesuffix("_token_len")
            record = {"dataset": name, "split": split, "text": what, "rows": len(lengths), "min": lengths.min()}
            record |= {"median": lengths.median(), "mean": round(lengths.mean(), 1), "max": lengths.max()}
            records.append(record | {"limit": limit})
            step = 1 + limit // 100
            axes[i, j].hist(lengths, bins=range(0, limit + step + 1, step))
            axes[i, j].axvline(limit, color="black", linestyle="--", linewidth=1)
            axes[i, j].set_title(f"{split}: {what}\nmax {lengths.max()}, limit {limit}", fontsize=9)
            axes[i, j].set(xlabel="tokens", ylabel="rows")
    return pd.DataFrame(records), figure


def group_counts(data: DatasetDict) -> pd.DataFrame:
    """Detail 1: pairs per split and batch, raw split, confidence; null is a group of its own, "null"."""
    records = []
    for split, dataset in data.items():
        groups = dataset.select_columns(["batch", "split", "extra"])[:]
        groups["confidence"] = [extra["confidence"] for extra in groups.pop("extra")]
        for column, values in groups.items():
            counts = Counter("null" if value is None else value for value in values)
            for value in sorted(counts, key=lambda value: (isinstance(value, str), value)):
                records.append({"split": split, "column": column, "value": value, "pairs": counts[value]})
    return pd.DataFrame(records)


def show(title: str, frame: pd.DataFrame, rows: int = 20):
    """Print the first `rows` rows of a table."""
    table = Table(*map(str, frame.columns), title=title, title_justify="left")
    for record in frame.head(rows).itertuples(index=False):
        table.add_row(*map(str, record))
    console.print(table)
    if len(frame) > rows:
        console.print(f"… and {len(frame) - rows} more rows in the CSV file")


def card_text(name: str, args: Args, lengths: pd.DataFrame, data: DatasetDict) -> str:
    """Body of the data card: where the data come from, columns, statistics, command line."""
    columns = "\n".join(f"| `{column}` | {kind} |" for column, kind in data[next(iter(data))].features.items())
    table = lengths.drop(columns="dataset")
    rows = "\n".join(f"| {' | '.join(map(str, record))} |" for record in table.itertuples(index=False))
    source = args.sft_dataset if name == "sft" else args.preference_dataset
    return f"""# TL;DR {name} data, pre-tokenised

Made from `{source}` with the tokenizer `{args.tokenizer}` and a `[PAD]` token added to it, after Details 1-6 of
"The N+ Implementation Details of RLHF with PPO". `query_token` is padded on the left, all other tokens on the right.
In `…_response_label` the query is replaced by the pad id.

```
{shlex.join(["python", *sys.argv])}
```

{chr(10).join(f"- {field}: `{value}`" for field, value in asdict(args).items())}

## Token lengths

| {" | ".join(table.columns)} |
|{"---|" * len(table.columns)}
{rows}

## Columns

| column | type |
|---|---|
{columns}
"""


class RateColumn(ProgressColumn):
    """Rows per second."""

    def render(self, task):
        return f"{task.finished_speed or task.speed or 0:.0f} rows/s"


def process_split(
    label: str, rows: list[tuple[str, dict]], process: Callable[[dict], dict], features: Features, cache_dir: str
) -> tuple[Dataset, Counter]:
    """(Dataset of process(row), counts of truncated queries and null subreddits); the first bad row ends the run."""
    counts = Counter()

    def generate():
        speed = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), RateColumn())
        with Progress(*speed, TimeRemainingColumn(), console=console) as progress:
            for where, row in progress.track(rows, description=label):
                try:
                    columns = process(row)
                except ValueError as error:
                    fail(f"{where}: {error}")
                info = columns.get("info", columns)
                counts[truncation(info, columns["query"])] += 1
                counts["null subreddit"] += info.get("article") is None and not info["subreddit"]
                yield {column: columns.get(column) for column in features}

    # the fingerprint names a file in a fresh folder: it need not depend on the content, and nothing can be stale
    fingerprint = re.sub(r"\W", "_", label)
    return Dataset.from_generator(generate, features=features, cache_dir=cache_dir, fingerprint=fingerprint), counts


def main(args: Args):
    disable_progress_bars()  # of `datasets`; ours shows rate and time left
    output_dir = Path(args.output_dir)
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        fail(f"{output_dir} already holds data: remove it, or choose another --output-dir")
    if args.push_to_hub and not (args.hub_id_sft and args.hub_id_preference):
        fail("--push-to-hub needs --hub-id-sft and --hub-id-preference")

    # ---- tokenizer -----------------------------------------------------------------------------------
    name, _, revision = args.tokenizer.partition("@")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main", trust_remote_code=False)
    except Exception as error:  # of many kinds: no such folder, no such repository, Hub out of reach
        fail(f"--tokenizer {args.tokenizer} cannot be loaded ({one_line(error)})")
    if tokenizer.eos_token is None:
        fail(f"--tokenizer {args.tokenizer} has no EOS token, which ends every response (Detail 3)")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # Detail 3: never EOS, whatever padding it had before
    console.print(f"EOS {tokenizer.eos_token} is id {tokenizer.eos_token_id}, [PAD] is id {tokenizer.pad_token_id}")

    # ---- read raw rows ---------------------------------------------------------------------------------
    raw = {
        "sft": read_raw(args.sft_dataset, SPLITS["sft"], SFT_COLUMNS),
        "preference": read_raw(args.preference_dataset, SPLITS["preference"], PREFERENCE_COLUMNS),
    }
    raw["preference"] = split_off_cnndm(raw["preference"])
    for name, splits in raw.items():
        found = ", ".join(f"{split} {len(rows)}" for split, rows in splits.items())
        absent = [split for split in SPLITS[name] if split not in splits]
        console.print(f"{name}: {found} rows" + (f"; absent and left out: {', '.join(absent)}" if absent else ""))
    features = {name: column_types(name, raw[name]) for name in raw}
    processes = {"sft": process_sft_row, "preference": process_preference_row}

    # everything is written beside the output folder and renamed at the end: nothing half done is left behind
    temporary = output_dir.with_name(f"{output_dir.name}.tmp-{os.getpid()}")
    try:
        # ---- tokenise ------------------------------------------------------------------------------------
        statistics = temporary / "statistics"
        statistics.mkdir(parents=True)
        data, truncations = {}, []
        for name, splits in raw.items():
            data[name] = DatasetDict()
            process = partial(processes[name], tokenizer=tokenizer, args=args)
            for split, rows in splits.items():
                cache_dir = str(temporary / "cache")
                data[name][split], counts = process_split(f"{name} {split}", rows, process, features[name], cache_dir)
                record = {"dataset": name, "split": split, "queries": len(rows), "cut at a newline": counts["newline"]}
                record["cut by characters"] = counts["character"]
                truncations.append(record | {"null subreddit": counts["null subreddit"]})
            data[name].save_to_disk(temporary / name)

        # ---- statistics ------------------------------------------------------------------------------------
        lengths = {}
        for name in data:
            lengths[name], figure = length_statistics(name, data[name], args)
            figure.savefig(statistics / f"lengths_{name}.png", dpi=100)  # figures 2 and 3
        pairs = {split: policy_pair_counts(dataset["policies"]) for split, dataset in data["preference"].items()}
        table_2 = pd.DataFrame([{"split": split, "unique pairs": len(counts)} for split, counts in pairs.items()])
        tables = {
            "lengths": ("Detail 4: token lengths", pd.concat(lengths.values(), ignore_index=True)),
            "truncation": ("Detail 2: truncated queries", pd.DataFrame(truncations)),
            "groups": ("Detail 1: pairs per batch, split and confidence", group_counts(data["preference"])),
            "policy_pairs": ("Detail 6, table 2: unique pairs of policies", table_2),
        }
        for split, counts in pairs.items():
            named = [(policies.replace("--", ", "), count) for policies, count in counts]
            frame = pd.DataFrame(named, columns=["policies", "count"])
            tables[f"policy_pairs_{split}"] = (f"Detail 6, tables 21-27: pairs of policies in {split}", frame)
        for file, (title, frame) in tables.items():
            frame.to_csv(statistics / f"{file}.csv", index=False)
            show(title, frame, rows=len(frame) if file == "lengths" else 20)
        for name in data:
            card = card_text(name, args, lengths[name], data[name])
            (temporary / name / "README.md").write_text(card, encoding="utf-8")

        # ---- save ------------------------------------------------------------------------------------------
        shutil.rmtree(temporary / "cache")
        if output_dir.exists():
            output_dir.rmdir()
        temporary.rename(output_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    console.print(f"wrote {output_dir}/sft, {output_dir}/preference and {output_dir}/statistics")

    # ---- push to the Hub -----------------------------------------------------------------------------------
    if args.push_to_hub:
        for name, repository in (("sft", args.hub_id_sft), ("preference", args.hub_id_preference)):
            folder = output_dir / name
            try:
                DatasetDict.load_from_disk(str(folder)).push_to_hub(repository, revision=args.hub_revision)
                pushed = {"repo_id": repository, "repo_type": "dataset", "revision": args.hub_revision}
                card = DatasetCard.load(hf_hub_download(filename="README.md", **pushed))
                card.text = (folder / "README.md").read_text(encoding="utf-8")
                readme = {"path_or_fileobj": str(card).encode(), "path_in_repo": "README.md"}
                HfApi().upload_file(**readme, **pushed)
            except Exception as error:  # of many kinds; the data are safe on disk
                where = f"'{repository}', revision='{args.hub_revision}'"
                later = f"from datasets import load_from_disk; load_from_disk('{folder}').push_to_hub({where})"
                fail(
                    f"the push to {repository} failed ({one_line(error)}). "
                    f'The data are complete in {output_dir}; to push them later: python -c "{later}"'
                )
            console.print(f"pushed {name} to {repository}@{args.hub_revision}")


if __name__ == "__main__":
    main(tyro.cli(Args))
