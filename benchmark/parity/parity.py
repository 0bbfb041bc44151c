"""Run the authors' code beside ours, and tabulate every quantity of the data, SFT, the reward model, DPO and PPO with
its largest difference.

    git clone https://github.com/vwxyzjn/summarize_from_feedback_details authors
    pip install --target old_libraries transformers==4.33.2 tokenizers==0.13.3      # Python 3.11 has wheels for it
    python benchmark/parity/parity.py --authors authors --old-libraries old_libraries

theirs.py executes the authors' functions and loops as they stand in their files, in a process of its own on the
libraries that they pinned. ours.py runs our scripts as whole programs. Both get the same small random GPT-NeoX model,
one process, and mini-batches of one micro-batch. There, what the authors compute per device or per micro-batch is
computed over the whole mini-batch, as ours is. Only sampling is replaced, because theirs is multinomial and ours is
keyed: both get the same responses, with EOS at the first place, in the middle, at the last place, twice, or never.

The bound of a quantity is measured. We run the authors' code again with the rows of each mini-batch in other orders.
The bound is ten times the largest difference between these runs, and at least 1e-6 of the largest value. Tokens must be
equal. A difference above its bound must be explained by a deviation that the script's docstring names: once it is
undone in a copy of the script, the difference must be within the bound. The table then shows both differences. The exit
code is 1 if a difference has no such reason.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import ours as our_side
import torch
import tyro
from transformers import AutoTokenizer

COMMIT = "ee77a9a"
HASHES = {
    "tldr_dataset.py": "6623b821fba549812f2bc0d4b2d3cadaa274ddaca28d290ff56389973ccd9ac0",
    "sft.py": "463d46e703c1c279b25e0486426bed6eceeb59336e21737f995e366f79a28414",
    "reward.py": "87e1c464c81575d203294a9f71ab03e45b81b8c68b2c4393b5375676911b6702",
    "ppo.py": "63564bbf56bff3770a642001f675fa1af6ae63edb310ea2216b177e14d12930c",
    "dpo.py": "fe557dcf9ff2e837926851aff4e881af3fbdf9b8c1edd917959e6a4483df2da1",
}
GET = f"git archive --format=tar {COMMIT} summarize_from_feedback_details | tar -x -C FOLDER, in a clone of theirs"
OLD = {"transformers": "4.33.2", "tokenizers": "0.13.3"}
GET_OLD = "pip install --target FOLDER transformers==4.33.2 tokenizers==0.13.3, with Python 3.11"
PPO_CASES = {  # title: settings
    "PPO": {"whiten_rewards": False, "num_mini_batches": 1},
    "PPO, whitened rewards": {"whiten_rewards": True, "num_mini_batches": 1},
    "PPO, two mini-batches": {"whiten_rewards": False, "num_mini_batches": 2},
}


@dataclass
class Args:
    authors: str
    """folder with their summarize_from_feedback_details/*.py"""
    old_libraries: str
    """folder with transformers 4.33.2 and tokenizers 0.13.3"""
    data: str = "../shared/data"
    """folder with real posts and pairs: tldr_posts/*.jsonl, tldr_comparisons/*.jsonl"""
    tokenizer: str = "../shared/data/tokenizer"
    """Pythia's tokenizer: a folder"""
    work: str = "runs/parity"
    """folder for models, data and runs"""
    output: str = "benchmark/results/parity.md"
    """the table"""
    orders: int = 2
    """other orders of the rows that the bounds are measured with"""


@dataclass
class Row:
    """One quantity of the table."""

    quantity: str
    ours: str
    theirs: str
    difference: float
    """largest absolute difference of numbers (float), or how many rows of tokens differ (int)"""
    bound: float
    reason: str = ""
    undone: float | None = None
    """the difference once the deviations that `reason` links to are undone"""

    def stands(self) -> bool:
        return self.difference <= self.bound or (self.undone is not None and self.undone <= self.bound)


def fail(message: str):
    """End the process with one clear message on standard error and exit code 1."""
    raise SystemExit(f"error: {message}")


# ---- preparation --------------------------------------------------------------------------------------------------


def check_folders(args: Args):
    """End with an error if the authors' files, the libraries or the data are not what they should be."""
    for name, expected in HASHES.items():
        path = Path(args.authors, "summarize_from_feedback_details", name)
        if not path.exists():
            fail(f"--authors: {path} is not there. Get it: {GET}")
        if hashlib.sha256(path.read_bytes()).hexdigest() != expected:
            fail(f"--authors: {path} is of another commit. Get it: {GET}")
    for name, version in OLD.items():
        if not Path(args.old_libraries, f"{name}-{version}.dist-info").exists():
            fail(f"--old-libraries {args.old_libraries}: no {name} {version} there. Get it: {GET_OLD}")
    for path in (Path(args.data, "tldr_posts/train.jsonl"), Path(args.tokenizer, "tokenizer.json")):
        if not path.exists():
            fail(f"{path} is not there: name the folder with --data, --tokenizer")


def raw_rows(args: Args, name: str, *splits: str) -> list[dict]:
    """Return the rows of these splits of the raw data."""
    paths = [Path(args.data, name, f"{split}.jsonl") for split in splits]
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n")]


def load_tokenizer(args: Args):
    """Return the tokenizer with [PAD], the last of its ids."""
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return tokenizer


def prepare(args: Args):
    """Check the folders, and make the model and the data of all runs: short real posts and pairs."""
    check_folders(args)
    work, tokenizer = Path(args.work), load_tokenizer(args)

    def short(*texts: str) -> bool:
        return all(len(tokenizer(text).input_ids) < 36 for text in texts)

    posts = raw_rows(args, "tldr_posts", "train", "validation")
    posts = [row for row in posts if short(row["title"], row["summary"])]
    pairs = raw_rows(args, "tldr_comparisons", "train")
    pairs = [row for row in pairs if short(row["info"]["title"], *(summary["text"] for summary in row["summaries"]))]
    for name, rows, size in (("posts", posts, 96), ("pairs", pairs, 64)):
        (work / name).mkdir(parents=True, exist_ok=True)
        for split, part in (("train", rows[:size]), ("validation", rows[size : size + 8])):
            (work / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    our_side.make_data(work, args.tokenizer)
    theirs(args, "make_model")


def theirs(args: Args, kind: str, **job) -> list[dict]:
    """Run a function of theirs.py in a process with the old libraries, and return the quantities of each of its
    runs."""
    work = Path(args.work)
    job |= {"kind": kind, "authors": args.authors, "tokenizer": args.tokenizer, "work": args.work}
    job |= {"model": str(work / "policy"), "learning_rate": our_side.LEARNING_RATE}
    torch.save(job, work / "job.pt")
    environment = os.environ | {"PYTHONPATH": args.old_libraries, "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(Path(__file__).with_name("theirs.py")), args.work]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        fail(f"their side of {kind} failed:\n{done.stderr[-3000:]}")
    return torch.load(work / "theirs.pt", weights_only=False)


def with_other_orders(order: list[torch.Tensor], mini_batches: int, count: int) -> list[list[torch.Tensor]]:
    """Return an order of the rows, one tensor per update or epoch, and `count` others that keep every row in its
    mini-batch."""
    orders = [order]
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        parts = [rows.chunk(mini_batches) for rows in order]
        orders.append([torch.cat([x[torch.randperm(len(x), generator=generator)] for x in part]) for part in parts])
    return orders


# ---- comparison ---------------------------------------------------------------------------------------------------


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float | int:
    """Return the largest absolute difference of two tensors of numbers, or how many rows differ in two of tokens."""
    if b.is_floating_point():
        return (a.double() - b.double()).abs().max().item()
    return (a != b).any(1).sum().item()


def compare(title: str, script: str, ours, runs: list[dict]) -> list[Row]:
    """Return a row for each quantity: ours(patches), where patches change the script, against the first of the authors'
    runs. Where rows are above their bounds, all deviations of the script are undone, and each row names its own."""
    expected, *others = runs
    actual = ours([])
    if actual.keys() != expected.keys():
        fail(f"{title}: quantities of one side alone: {sorted(actual.keys() ^ expected.keys())}")
    rows = {}
    for key, value in expected.items():
        if actual[key].shape != value.shape:
            fail(f"{title}: {key} has shape {tuple(actual[key].shape)}, theirs {tuple(value.shape)}")
        floor = max([largest_difference(other[key], value) for other in others], default=0)
        bound = max(10 * floor, 1e-6 * value.abs().max().item()) if value.is_floating_point() else 0
        difference = largest_difference(actual[key], value)
        rows[key] = Row(f"{title}: {key}", shown(actual[key]), shown(value), difference, bound)
    deviations = [x for x in our_side.DEVIATIONS if x.script == script]
    above = {key: row for key, row in rows.items() if row.difference > row.bound}
    undone = ours([patch for x in deviations for patch in x.undone]) if above and deviations else {}
    for key, row in above.items():
        reasons = [x for x in deviations if re.search(x.quantities, row.quantity)]
        if reasons:
            row.undone = largest_difference(undone[key], expected[key])
            row.reason = "; ".join(f"[{x.sentence}](../../{our_side.line_of(x)})" for x in reasons)
    return list(rows.values())


def shown(x: torch.Tensor) -> str:
    """Return a number, or the norm of several; nothing for tokens."""
    if not x.is_floating_point():
        return ""
    return f"{x.item():.7g}" if x.numel() == 1 else f"norm {x.double().norm().item():.7g}"


# ---- the parts ----------------------------------------------------------------------------------------------------


def tokens(args: Args) -> list[Row]:
    """Compare the columns of all posts, all pairs whose policies are known (their code fails for others), and made-up
    pairs about news."""
    posts = raw_rows(args, "tldr_posts", "train", "validation", "test")
    pairs = raw_rows(args, "tldr_comparisons", "train", "validation")
    pairs = [pair for pair in pairs if all(summary["policy"] for summary in pair["summaries"])]
    raw = {"posts": posts, "pairs": pairs, "news": news_pairs(posts)}
    runs = theirs(args, "tokens", **raw)
    tokenizer = load_tokenizer(args)

    def ours(patches) -> dict:
        return our_side.tokens(Path(args.work), patches, **raw, tokenizer=tokenizer)

    return compare("tokens", "tldr_dataset.py", ours, runs)


def news_pairs(posts: list[dict]) -> list[dict]:
    """Return forty pairs in the format of the CNN/DM pairs, with articles made of posts."""
    pairs = []
    for i in range(40):
        article = "\n\n".join(post["post"] for post in posts[5 * i : 5 * i + (2 if i % 2 else 9)])
        if i % 4 == 0:
            article = article.replace("\n", " ")
        info = {"id": str(i), "post": None, "title": None, "subreddit": None, "site": "cnn", "article": article}
        summaries = [{"text": " " + posts[i]["summary"], "policy": "ref", "note": None}]
        summaries.append({"text": " " + posts[i + 1]["summary"], "policy": "sup1", "note": None})
        pair = {"info": info, "summaries": summaries, "choice": i % 2, "worker": "w", "batch": "cnndm0"}
        pairs.append(pair | {"split": "valid1", "extra": {"confidence": 5}})
    return pairs


def stage(args: Args, title: str, name: str, data: str, columns: list[str], **more) -> list[Row]:
    """Compare four updates of eight rows of SFT, reward model or DPO."""
    work = Path(args.work)
    batches = our_side.first_rows(work, f"{name}.py", data, columns, our_side.BATCH, 4)
    orders = with_other_orders([torch.arange(our_side.BATCH)] * 4, 1, args.orders)
    runs = theirs(args, name, batches=batches, orders=orders, **more)
    return compare(title, f"{name}.py", lambda patches: getattr(our_side, name)(work, patches, **more), runs)


def sft(args: Args) -> list[Row]:
    return stage(args, "SFT", "sft", "sft", ["query_reference_response_token"])


def reward(args: Args) -> list[Row]:
    """Compare the training of a given head, centring, the initialisation of a new head, and the conversion of a
    released model."""
    hidden = json.loads(Path(args.work, "policy/config.json").read_text())["hidden_size"]
    head = torch.randn(1, hidden, generator=torch.Generator().manual_seed(4)) / (hidden + 1) ** 0.5
    columns = ["query_chosen_token", "query_rejected_token"]
    references = our_side.train_split(Path(args.work), "sft")["query_reference_response_token"][:]
    return stage(args, "reward model", "reward", "preference", columns, head=head, references=references)


def dpo(args: Args) -> list[Row]:
    columns = ["query_chosen_token", "query_rejected_token"]
    columns += [f"{column}_response_label" for column in columns]
    return stage(args, "DPO", "dpo", "preference", columns)


def ppo(args: Args) -> list[Row]:
    """Compare three updates of four epochs in each case. The reward model is that of `reward`."""
    return [row for title in PPO_CASES for row in ppo_case(args, title)]


def ppo_case(args: Args, title: str) -> list[Row]:
    """Compare PPO with the settings of one of PPO_CASES."""
    work, settings = Path(args.work), PPO_CASES[title]
    batches = our_side.first_rows(work, "ppo.py", "sft", ["query_token"], our_side.PPO_BATCH, 3)
    queries = [batch["query_token"] for batch in batches]
    responses = given_responses(args)
    order = our_side.ppo_order(work, settings["num_mini_batches"])
    orders = with_other_orders(order, settings["num_mini_batches"], args.orders)
    runs = theirs(args, "ppo", queries=queries, responses=responses, orders=orders, **settings)
    return compare(title, "ppo.py", lambda patches: our_side.ppo(work, patches, responses, settings), runs)


def given_responses(args: Args) -> list[torch.Tensor]:
    """Return the responses (16, 24) of three updates: random tokens, with EOS at the places `ends` of a row. The last
    rows have no EOS."""
    tokenizer = load_tokenizer(args)
    generator = torch.Generator().manual_seed(9)
    ends = [[0], [0, 5], [1], [7], [7, 15], [22], [23], [23], [12], [3, 23], [20], [16]]
    updates = []
    for _ in range(3):
        responses = torch.randint(1, tokenizer.pad_token_id, (our_side.PPO_BATCH, 24), generator=generator)
        responses[responses == tokenizer.eos_token_id] = 5
        for row, places in enumerate(ends):
            responses[row, places] = tokenizer.eos_token_id
        updates.append(responses)
    return updates


# ---- the table ----------------------------------------------------------------------------------------------------


def markdown(rows: list[Row], args: Args, seconds: float) -> str:
    """Return the page with the table."""
    command = " ".join(["python", *sys.argv])
    lines = [
        "# The authors' code beside ours",
        "",
        f"`{command}`: {seconds / 60:.0f} minutes, torch {torch.__version__}, one thread of a CPU.",
        f"Theirs: vwxyzjn/summarize_from_feedback_details at {COMMIT}, on transformers 4.33.2 and tokenizers 0.13.3.",
        "",
        "A bound is ten times the largest difference between two runs of the authors' code that differ only in the",
        f"order of the rows in a mini-batch ({args.orders} other orders), and at least 1e-6 of the largest value. For",
        "tokens, the table counts rows that differ. Both sides get the same responses, so sampling is not compared.",
        "Nor are TRL's PPO loss, the entropy (the authors log another quantity), and the bias of the reward head",
        "before centring, whose gradient is 0 except for rounding.",
        "",
        "| quantity | ours | theirs | largest difference | bound | reason, and the difference without it |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        reason = f"{row.reason}: {number(row.undone)}" if row.undone is not None else ""
        if not row.stands():
            reason = f"**NO REASON** {reason}"
        numbers = f"{number(row.difference)} | {number(row.bound)}"
        lines.append(f"| {row.quantity} | {row.ours} | {row.theirs} | {numbers} | {reason} |")
    return "\n".join(lines) + "\n"


def number(value: float | int) -> str:
    """Return a difference of numbers, or a count of rows, as text."""
    return f"{value} rows" if isinstance(value, int) else f"{value:.1e}"


def main(args: Args):
    start = time.time()
    torch.set_num_threads(1)
    prepare(args)
    rows = []
    for part in (tokens, sft, reward, dpo, ppo):
        part_rows = part(args)
        rows += part_rows
        wrong = [row for row in part_rows if not row.stands()]
        print(f"{part.__name__}: {len(part_rows)} quantities, {len(wrong)} above their bounds without a reason")
        for row in wrong:
            print(f"  {row.quantity}: {row.difference:.1e} above {row.bound:.1e}, undone {row.undone}")
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(args.output).write_text(markdown(rows, args, time.time() - start))
    print(f"{args.output}: {len(rows)} quantities in {time.time() - start:.0f} s")
    if any(not row.stands() for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main(tyro.cli(Args))
