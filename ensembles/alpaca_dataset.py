"""Instruction data in the ensemble paper's format, pre-tokenised into the columns of the TL;DR data.

    python ensembles/alpaca_dataset.py --base EleutherAI/pythia-1.4b --output-dir data/alpaca
    python ensembles/alpaca_dataset.py --dataset rows.jsonl --base quickstart/bases/nano-s --output-dir data/alpaca

Rows have `instruction`, `input` (may be empty) and `output`, and may have AlpacaFarm's `split`: sft, pref, unlabeled or
val. Where no row has a split, the rows are dealt out in AlpacaFarm's proportions (10 : 10 : 20 : 2 of 52 thousand, the
rest unused; appendix D.2), in an order drawn from --seed. A prompt is (appendix D.3, table 5)

    <|prompter|>INSTRUCTION[newline INPUT]<|endoftext|><|assistant|>

and an answer is OUTPUT<|endoftext|>. The tokens <|prompter|> and <|assistant|> are added to the tokenizer of --base.
Because each stage takes its tokenizer from the checkpoint that it starts from, the script also writes a copy of --base
with the extended tokenizer.

OUTPUT_DIR/base is what sft.py starts from (--model OUTPUT_DIR/base). The data sets are OUTPUT_DIR/sft (train: sft),
OUTPUT_DIR/pref (train: pref, the prompts that gold_label.py answers and labels) and OUTPUT_DIR/unlabeled (train:
unlabeled, PPO's prompts); `validation` of each is val. Rows without output are left out and counted, as are
rows whose prompt or answer is too long.
"""

import json
import random
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from datasets import Dataset, DatasetDict, Features, List, Value, disable_progress_bars, load_dataset
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "eval")]

from eval_helpers import fail, one_line  # noqa: E402

SPLITS = {"sft": 10_000, "pref": 10_000, "unlabeled": 20_000, "val": 2_000, "unused": 10_000}  # AlpacaFarm's rows
TURNS = "<|prompter|>", "<|assistant|>"


@dataclass
class Args:
    dataset: str = "tatsu-lab/alpaca"
    """rows: a .jsonl file, a folder of them (one per split: sft.jsonl, pref.jsonl …), or a Hub id[@revision]"""
    base: str = "EleutherAI/pythia-1.4b"
    """model that will be trained: Hub id[@revision] or checkpoint folder"""
    output_dir: str = "data/alpaca"
    """folder to write; it must not hold anything yet"""
    max_query_length: int = 520
    """tokens of a prompt (table 4)"""
    max_response_length: int = 256
    """tokens of an answer, EOS included (table 4)"""
    seed: int = 1
    """of the order in which rows without splits are dealt out"""


def instruction_rows(source: str) -> list[tuple[str, dict]]:
    """(where, row) of all rows of a file, a folder or a Hub id, a row's `split` set from its file where it has none."""
    path = Path(source).expanduser()
    if not path.exists() and not source.endswith(".jsonl"):
        repository, _, revision = source.partition("@")
        try:
            loaded = load_dataset(repository, revision=revision or None)
        except Exception as error:  # the Hub client raises many kinds; all of them mean: no data
            fail(f"--dataset {source}: neither a file or folder nor a data set on the Hub ({one_line(error)})")
        names = {"preference": "pref", "validation": "val"}
        rows = [
            (f"{source} {x}, row {i}", {"split": names.get(x, x)} | r) for x in loaded for i, r in enumerate(loaded[x])
        ]
        return rows if len(loaded) > 1 else [(where, row | {"split": None}) for where, row in rows]
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        fail(f"--dataset {source}: no .jsonl file there")
    rows = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeError) as error:
            fail(f"{file} cannot be read ({one_line(error)})")
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                    rows.append((f"{file}, row {number}", ({"split": file.stem} if path.is_dir() else {}) | row))
                except (ValueError, TypeError) as error:
                    fail(f"{file}, row {number}: not a JSON object ({one_line(error)})")
    return rows


def deal_out(rows: list, seed: int) -> dict[str, list]:
    """{split: rows} by the rows' own `split`, or, where none has one, in AlpacaFarm's proportions."""
    named = [row.get("split") for _, row in rows]
    found = {split: [] for split in SPLITS}
    if any(named):
        for (where, row), split in zip(rows, named, strict=True):
            if split not in SPLITS:
                fail(f"{where}: split is {split!r}; it must be one of {', '.join(SPLITS)}, or no row has any")
            found[split].append((where, row))
        return found
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    total, begin = sum(SPLITS.values()), 0
    for split, count in SPLITS.items():
        end = begin + round(count * len(rows) / total) if split != "unused" else len(rows)
        found[split] = [rows[i] for i in sorted(order[begin:end])]
        begin = end
    return found


def encode(tokenizer: PreTrainedTokenizerBase, text: str | list[str]) -> list:
    """Token ids of plain text, or of each of several: nothing added, and what spells a special token stays text."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


def instruction_columns(row: dict, tokenizer, max_query_length: int, max_response_length: int) -> dict | None:
    """The columns of one row, named and padded as by tldr_dataset.py: prompts on the left, all else on the right; None
    where prompt or answer is too long. ValueError names a field that is wrong."""
    for field in ("instruction", "input", "output"):
        if not isinstance(row.get(field, ""), str) or (field != "input" and not row.get(field, "").strip()):
            raise ValueError(f"{field} should be text, and not empty, not {row.get(field)!r:.80}")
        if turn := next((turn for turn in TURNS if turn in row.get(field, "")), None):
            raise ValueError(f"{field} holds {turn}, which would begin a turn")
    prompt = row["instruction"] + (f"\n{row['input']}" if row.get("input") else "")
    prompter, assistant = tokenizer.convert_tokens_to_ids(list(TURNS))
    eos, eos_id, pad_id = tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id
    query = [prompter, *encode(tokenizer, prompt), eos_id, assistant]
    answer = [*encode(tokenizer, row["output"]), eos_id]
    if len(query) > max_query_length or len(answer) > max_response_length:
        return None
    text, both = f"{TURNS[0]}{prompt}{eos}{TURNS[1]}", query + answer
    padding = [pad_id] * (max_query_length + max_response_length - len(both))
    return {
        "instruction": row["instruction"],
        "input": row.get("input") or "",
        "output": row["output"],
        "query": text,
        "query_token": [pad_id] * (max_query_length - len(query)) + query,
        "query_token_len": len(query),
        "reference_response": row["output"] + eos,
        "reference_response_token": answer + [pad_id] * (max_response_length - len(answer)),
        "reference_response_token_len": len(answer),
        "query_reference_response": text + row["output"] + eos,
        "query_reference_response_token": both + padding,
        "query_reference_response_token_len": len(both),
        "query_reference_response_token_response_label": [pad_id] * len(query) + answer + padding,
    }


def instruction_features() -> Features:
    """Names and types of the columns."""
    text, number, tokens = Value("string"), Value("int64"), List(Value("int64"))
    features = dict.fromkeys(("id", "instruction", "input", "output"), text)
    for name in ("query", "reference_response", "query_reference_response"):
        features |= {name: text, f"{name}_token": tokens, f"{name}_token_len": number}
    return Features(features | {"query_reference_response_token_response_label": tokens})


def extended_base(path: str):
    """Model and tokenizer of --base with a token for each turn, and embeddings where it has no rows for them. They are
    no special tokens: decoding keeps them, as it does a prompt's text."""
    name, revision = path, ""
    if not Path(path).exists():  # a path may hold an @
        name, _, revision = path.partition("@")
    settings = {"revision": revision or "main", "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **settings)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **settings)
    except Exception as error:
        fail(f"--base {path}: no model that can be read ({one_line(error)})")
    if tokenizer.eos_token is None:
        fail(f"--base {path}: its tokenizer has no EOS token, which ends every turn")
    tokenizer.add_tokens([AddedToken(turn, normalized=False) for turn in TURNS])
    if model.get_input_embeddings().num_embeddings < len(tokenizer) + 1:  # and [PAD], which the stages add
        torch.manual_seed(1)
        model.resize_token_embeddings(len(tokenizer) + 1, pad_to_multiple_of=64, mean_resizing=False)
    return model, tokenizer


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


def main(args: Args):
    disable_progress_bars()  # of `datasets`; ours shows rate and time left
    output_dir = Path(args.output_dir).expanduser()
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        fail(f"{output_dir} already holds data: remove it, or choose another --output-dir")
    splits = deal_out(instruction_rows(args.dataset), args.seed)
    if empty := [split for split in ("sft", "pref", "unlabeled", "val") if not splits[split]]:
        fail(f"--dataset {args.dataset}: no rows for the split {empty[0]}; rows are too few, or their `split` says so")
    model, tokenizer = extended_base(args.base)
    with unfinished_folder(output_dir) as folder:
        finished = folder / "finished"
        model.save_pretrained(finished / "base")
        tokenizer.save_pretrained(finished / "base")
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # as the stages do, after the turns
        made, console = {}, Console(markup=False, highlight=False)
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            for split in ("sft", "pref", "unlabeled", "val"):
                found, empty = [], 0
                for number, (where, row) in enumerate(bar.track(splits[split], description=split)):
                    if isinstance(row.get("output"), str) and not row["output"].strip():  # 28 of Alpaca's have none
                        empty += 1
                        continue
                    try:
                        made_of = instruction_columns(row, tokenizer, args.max_query_length, args.max_response_length)
                    except ValueError as error:
                        fail(f"{where}: {error}")
                    found += [{"id": f"{split}_{number:06d}"} | made_of] if made_of else []
                if not found:
                    fail(
                        f"split {split}: no output, or every prompt or answer is longer than --max-query-length and "
                        "--max-response-length"
                    )
                made[split] = Dataset.from_list(found, features=instruction_features())
                too_long = len(splits[split]) - len(found) - empty
                console.print(
                    f"{split}: {len(found):,} rows; left out: {too_long:,} too long, {empty:,} without output"
                )
        for name in ("sft", "pref", "unlabeled"):
            DatasetDict({"train": made[name], "validation": made["val"]}).save_to_disk(finished / name)
    console.print(f"wrote {output_dir}/base, {output_dir}/sft, {output_dir}/pref and {output_dir}/unlabeled")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
