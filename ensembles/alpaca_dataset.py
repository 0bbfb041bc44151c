"""Instruction data in the ensemble paper's format, pre-tokenised into the columns of the TL;DR data.

    python ensembles/alpaca_dataset.py --base EleutherAI/pythia-1.4b --output-dir data/alpaca
    python ensembles/alpaca_dataset.py --dataset rows.jsonl --base quickstart/bases/nano-s --output-dir data/alpaca

Rows have `instruction`, `input` (may be empty) and `output`, and may have AlpacaFarm's `split`: sft, pref, unlabeled or
val. Where no row has a split, the rows are dealt out in AlpacaFarm's proportions (10 : 10 : 20 : 2 of 52 thousand, the
rest unused; appendix D.2), in an order drawn from --seed. A prompt is (appendix D.3, table 5)

    <|prompter|>INSTRUCTION[newline INPUT]<|endoftext|><|assistant|>

and an answer is OUTPUT<|endoftext|>. The tokens <|prompter|> and <|assistant|> are added to the tokenizer of --base.
Rows without output are left out and counted, as are rows whose prompt or answer is too long.

If --base lacks the two tokens, OUTPUT_DIR/base is a copy that has them; start sft.py from it. The data sets are
OUTPUT_DIR/sft (train: sft), OUTPUT_DIR/pref (train: pref, the prompts that gold_label.py answers and labels) and
OUTPUT_DIR/unlabeled (train: unlabeled, PPO's prompts); `validation` of each is val.
"""

import random
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import tyro
from datasets import Dataset, DatasetDict, Features, Value, disable_progress_bars, load_dataset
from rich.console import Console
from rich.progress import track

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "eval", "llama2")]

from eval_helpers import at_least, fail, or_fail, save_checkpoint  # noqa: E402
from preference_dataset import TURNS, load_base  # noqa: E402

from tldr_dataset import column_types, encode, padded_columns, read_file, text_field, unfinished_folder  # noqa: E402

SPLITS = {"sft": 10_000, "pref": 10_000, "unlabeled": 20_000, "val": 2_000, "unused": 10_000}  # AlpacaFarm's rows
INSTRUCTION_FIELDS = ("instruction", "input", "output")


@dataclass
class Args:
    dataset: str = "tatsu-lab/alpaca"
    """rows: a .jsonl file or a Hub id[@revision]"""
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
    """Return (where, row) for all rows of a file or a Hub id. If a Hub data set has several splits, their names are the
    `split` of rows without one."""
    path, rows = Path(source).expanduser(), []
    if path.exists():
        return read_file(path)
    repository, _, revision = source.partition("@")
    with or_fail(f"--dataset {source}: no such file, and no data set on the Hub"):
        loaded = load_dataset(repository, revision=revision or None)
    names = {"preference": "pref", "validation": "val"}
    for name, split_rows in loaded.items():
        split = {"split": names.get(name, name)} if len(loaded) > 1 else {}
        rows += [(f"{source} {name}, row {number}", split | row) for number, row in enumerate(split_rows)]
    return rows


def deal_out(rows: list, seed: int) -> dict[str, list]:
    """Return {split: rows} by the rows' own `split` or, if none has one, in AlpacaFarm's proportions. Rows
    of one prompt then stay together, so that no prompt is trained on and evaluated."""
    splits_rows = {split: [] for split in SPLITS}
    if any(row.get("split") for _, row in rows):
        for where, row in rows:
            if row.get("split") not in SPLITS:
                fail(f"{where}: `split` must be one of {', '.join(SPLITS)}, or no row has any")
            splits_rows[row["split"]].append((where, row))
        return splits_rows
    of_prompt = defaultdict(list)
    for where, row in rows:
        of_prompt[row.get("instruction"), row.get("input") or ""].append((where, row))
    prompts, order = list(of_prompt.values()), list(range(len(of_prompt)))
    random.Random(seed).shuffle(order)
    total, begin = sum(SPLITS.values()), 0
    for split, count in SPLITS.items():
        end = begin + round(count * len(prompts) / total) if split != "unused" else len(prompts)
        splits_rows[split] = [row for i in sorted(order[begin:end]) for row in prompts[i]]
        begin = end
    return splits_rows


def instruction_columns(row: dict, tokenizer, max_query_length: int, max_response_length: int) -> dict | None:
    """Return the columns of a row, named and padded as by tldr_dataset.py (prompts on the left, all else on the right),
    or None if the prompt or the answer is too long. Raises ValueError naming a field that is wrong."""
    columns = {field: text_field(row, field, field, required=field != "input") or "" for field in INSTRUCTION_FIELDS}
    for field, text in columns.items():
        if any(turn in text for turn in TURNS):
            raise ValueError(f"{field} holds {' or '.join(TURNS)}, which would begin a turn")
    prompt = columns["instruction"] + (f"\n{columns['input']}" if columns["input"] else "")
    prompter, assistant = tokenizer.convert_tokens_to_ids(list(TURNS))
    eos, eos_id, pad_id = tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id
    query = [prompter, *encode(tokenizer, prompt), eos_id, assistant]
    answer = [*encode(tokenizer, columns["output"]), eos_id]
    if len(query) > max_query_length or len(answer) > max_response_length:
        return None
    text = f"{TURNS[0]}{prompt}{eos}{TURNS[1]}"
    columns |= {"query": text, "query_token": [pad_id] * (max_query_length - len(query)) + query}
    texts = columns["output"] + eos, text + columns["output"] + eos
    widths = (max_query_length, max_response_length, max_query_length + max_response_length)
    response = padded_columns("reference_response", texts, query, answer, pad_id, widths)
    return columns | {"query_token_len": len(query)} | response


def main(args: Args):
    disable_progress_bars()  # of `datasets`
    at_least(1, args, "max_query_length", "max_response_length")
    output_dir = Path(args.output_dir).expanduser()
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        fail(f"{output_dir} already holds data: remove it, or choose another --output-dir")
    splits = deal_out(instruction_rows(args.dataset), args.seed)
    model, tokenizer = load_base(args.base, turns=True)
    with unfinished_folder(output_dir) as folder:
        made, finished = {}, folder / "finished"
        if model is not None:  # --base lacks the turns
            save_checkpoint(model, tokenizer, finished / "base")
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # as the stages do, after the turns
        for split in ("sft", "pref", "unlabeled", "val"):
            made_rows, without_output, too_long = [], 0, 0
            for number, (where, row) in enumerate(track(splits[split], split, console=Console(stderr=True))):
                if isinstance(row.get("output"), str) and not row["output"].strip():  # 28 of Alpaca's rows
                    without_output += 1
                    continue
                try:
                    columns = instruction_columns(row, tokenizer, args.max_query_length, args.max_response_length)
                except ValueError as error:
                    fail(f"{where}: {error}")
                if columns is None:
                    too_long += 1
                else:
                    made_rows.append({"id": f"{split}_{number:06d}"} | columns)
            print(
                f"{split}: {len(made_rows):,} rows; left out: {too_long:,} too long, {without_output:,} without output"
            )
            if not made_rows:
                fail(f"split {split}: no rows; add some, or try a larger --max-query-length or --max-response-length")
            types = column_types("sft") | dict.fromkeys(INSTRUCTION_FIELDS, Value("string"))
            types = {name: kind for name, kind in types.items() if name in made_rows[0]}
            made[split] = Dataset.from_list(made_rows, features=Features(types))
        for name in ("sft", "pref", "unlabeled"):
            DatasetDict({"train": made[name], "validation": made["val"]}).save_to_disk(finished / name)
    print(f"wrote {', '.join(str(folder) for folder in sorted(output_dir.iterdir()))}")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
