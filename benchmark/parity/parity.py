"""The authors' own code beside ours: every quantity of SFT, reward model, DPO and PPO, and the largest difference.

    git clone https://github.com/vwxyzjn/summarize_from_feedback_details authors
    pip install --target old_libraries transformers==4.33.2 tokenizers==0.13.3      # Python 3.11 has wheels for it
    python benchmark/parity/parity.py --authors authors --old-libraries old_libraries
    # and the ensemble paper's: --ensemble-authors FOLDER, a clone of https://github.com/tlc4418/llm_optimization

Their functions and loops run as they stand in their files (theirs.py), in a process of their own on the
libraries that they pinned. Our scripts run as whole programs (ours.py). Both get small random GPT-NeoX models,
one process and batches of one micro-batch, where per-device and global statistics agree. Sampling alone is replaced:
theirs is multinomial and ours keyed, so both get the same responses, with EOS at the first place, in the middle, at the
last place, twice, and never.

The bound of a quantity is measured: theirs against theirs with the rows of each mini-batch in another order, the
largest difference of five, times ten, and at least 1e-6 of the largest value. Tokens are equal or they differ. Where a
difference is above its bound, a deviation that the script's docstring tells of has to explain it: with that undone in a
copy of the script the difference is under the bound, and both numbers stand in the table. Else the exit code is 1.
"""

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy
import ours as our_side
import scipy.special
import theirs as their_side
import torch
import tyro
from rich.console import Console
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
ENSEMBLE_HASHES = {
    "src/bon/ensemble_rm.py": "0469de9f108e6994ec218dfff2c7f1b482b86ff1a652e2e82ac6d49d2bad02d2",
    "src/bon/bon_sampling.py": "167ef5bc91ce260ead063e9e8331e3be8adb83eb2e21233870871583b69edc7b",
    "src/reward_modeling/scoring/ppo_reward_functions.py": (
        "11b7b50ba438ea05c9933cde7d6d9db46c77c48070267dec208a6eca19fa4b9c"
    ),
}
ENSEMBLE_GET = "git archive --format=tar 416b03c src | tar -x -C FOLDER, in a clone of tlc4418/llm_optimization"
OLD = {"transformers": "4.33.2", "tokenizers": "0.13.3"}
GET_OLD = "pip install --target FOLDER transformers==4.33.2 tokenizers==0.13.3, with Python 3.11"
ORDERS = 5  # other orders of the rows, for the floor
LIMITS = {"max_query_length": 96, "max_sft_response_length": 40, "max_rm_response_length": 48}
RESPONSE_LENGTH = 24
console = Console(width=None if sys.stdout.isatty() else 160)


@dataclass
class Args:
    authors: str
    """folder with their summarize_from_feedback_details/*.py"""
    old_libraries: str
    """folder with transformers 4.33.2 and tokenizers 0.13.3"""
    ensemble_authors: str | None = None
    """folder with the ensemble paper's src/, to compare its objectives and its best-of-n estimator as well"""
    data: str = "../shared/data"
    """folder with real posts and pairs: tldr_posts/*.jsonl, tldr_comparisons/*.jsonl"""
    tokenizer: str = "../shared/data/tokenizer"
    """Pythia's tokenizer: a folder"""
    work: str = "runs/parity"
    """folder for models, data and runs"""
    output: str = "benchmark/results/parity.md"
    """the table"""
    only: tuple[str, ...] = ("tokens", "sft", "reward", "dpo", "ppo", "ensembles", "findings")
    """parts to compare; findings: what is told beyond the comparison"""
    orders: int = ORDERS
    """other orders of the rows that the floor is the largest difference of"""
    learning_rate: float = 1e-3
    """of all runs: large, so that weights move"""


@dataclass
class Row:
    """One quantity of the table."""

    quantity: str
    ours: str
    theirs: str
    difference: float
    bound: float
    reason: str = ""
    undone: float | None = None
    """the difference where the deviation is undone"""

    def stands(self) -> bool:
        return self.difference <= self.bound or (self.undone is not None and self.undone <= self.bound)


def fail(message: str):
    """End the process with one clear message on standard error and exit code 1."""
    raise SystemExit(f"error: {message}")


# ---- what is there ------------------------------------------------------------------------------------------------


def check_folders(args: Args):
    """An error where their files, the libraries or the data are not what they should be."""
    check_files("--authors", Path(args.authors, "summarize_from_feedback_details"), HASHES, GET)
    if args.ensemble_authors:
        check_files("--ensemble-authors", Path(args.ensemble_authors), ENSEMBLE_HASHES, ENSEMBLE_GET)
    for name, version in OLD.items():
        if not Path(args.old_libraries, f"{name}-{version}.dist-info").exists():
            fail(f"--old-libraries {args.old_libraries}: no {name} {version} there. Get it: {GET_OLD}")
    for path in (Path(args.data, "tldr_posts/train.jsonl"), Path(args.tokenizer, "tokenizer.json")):
        if not path.exists():
            fail(f"{path} is not there: name the folder with --data, --tokenizer")


def check_files(flag: str, folder: Path, hashes: dict[str, str], get: str):
    """An error where a file is missing or not that of the commit that was read."""
    for name, expected in hashes.items():
        if not (folder / name).exists():
            fail(f"{flag}: {folder / name} is not there. Get it: {get}")
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != expected:
            fail(f"{flag}: {folder / name} is of another commit. Get it: {get}")


def theirs(args: Args, name: str, **job) -> list[dict]:
    """Run a job on their side; the quantities of each of its runs."""
    work = Path(args.work).resolve()
    torch.save({"authors": str(Path(args.authors).resolve()), **job}, work / f"{name}.job.pt")
    environment = os.environ | {"PYTHONPATH": str(Path(args.old_libraries).resolve()), "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(Path(__file__).with_name("theirs.py")), str(work), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        fail(f"their side of {name} failed:\n{done.stderr[-3000:]}")
    return torch.load(work / f"{name}.theirs.pt", weights_only=False)


def raw_rows(args: Args, name: str, splits: tuple[str, ...]) -> list[dict]:
    """The rows of these splits of the raw data."""
    rows = []
    for split in splits:
        with Path(args.data, name, f"{split}.jsonl").open(encoding="utf-8") as lines:
            rows += [json.loads(line) for line in lines]
    return rows


# ---- comparison ---------------------------------------------------------------------------------------------------


def shown(x: torch.Tensor) -> str:
    return f"{x.item():.7g}" if x.numel() == 1 else f"norm {x.norm().item():.7g}"


def compare(name: str, ours: dict, runs: list[dict]) -> list[Row]:
    """A row a quantity: ours against the first run of theirs, bounded by what their other runs differ from it."""
    first, *others = runs
    if ours.keys() != first.keys():
        fail(f"{name}: quantities of one side alone: {sorted(ours.keys() ^ first.keys())}")
    rows = []
    for key, expected in first.items():
        if ours[key].shape != expected.shape:
            fail(f"{name}: {key} has shape {tuple(ours[key].shape)}, theirs {tuple(expected.shape)}")
        floor = max([(other[key] - expected).abs().max().item() for other in others], default=0.0)
        bound = max(10 * floor, 1e-6 * expected.abs().max().item())
        difference = (ours[key].double() - expected).abs().max().item()
        rows.append(Row(f"{name}: {key}", shown(ours[key].double()), shown(expected), difference, bound))
    return rows


def explain(rows: list[Row], name: str, again, runs: list[dict], script: str):
    """Where rows are above their bounds: run ours with each deviation of the script undone, alone and all together, and
    note in the row what it then differs by. again(patches) -> our quantities."""
    above = [row for row in rows if row.difference > row.bound]
    fitting = [x for x in our_side.DEVIATIONS if x.script == script]
    fitting = [x for x in fitting if any(re.search(x.quantities, row.quantity) for row in above)]
    tries = [[x] for x in fitting] + [fitting] * (len(fitting) > 1)
    for deviations in tries:
        left = [row for row in above if row.undone is None or row.undone > row.bound]
        if not left:
            return
        undone = {row.quantity: row for row in compare(name, again(sum([x.undone for x in deviations], [])), runs)}
        for row in left:
            told = [x for x in deviations if re.search(x.quantities, row.quantity)]
            found = undone[row.quantity].difference
            if told and (row.undone is None or found < row.undone):
                row.undone = found
                row.reason = "; ".join(map(link, told))


def link(deviation: our_side.Deviation) -> str:
    """To the line of the docstring that tells of a deviation, from benchmark/results."""
    return f"[{deviation.told}](../../{our_side.line_of(deviation)})"


# ---- the parts ----------------------------------------------------------------------------------------------------


def tokens(args: Args) -> list[Row]:
    """All posts and pairs, and made-up CNN/DM pairs: rows whose columns differ."""
    posts = raw_rows(args, "tldr_posts", ("train", "validation", "test"))
    pairs = raw_rows(args, "tldr_comparisons", ("train", "validation"))
    news = cnndm_pairs(posts)
    [found] = theirs(args, "tokens", kind="tokenise", tokenizer=args.tokenizer, posts=posts, pairs=pairs + news)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    parts = {"posts": ("sft", found["sft"]), "pairs": ("preference", found["preference"][: len(pairs)])}
    parts["CNN/DM pairs"] = ("preference", found["preference"][len(pairs) :])
    fitting = [x for x in our_side.DEVIATIONS if x.script == "tldr_dataset.py"]

    def columns_of(patches) -> dict:
        rows = our_side.tokenise(Path(args.work), patches, posts, pairs + news, tokenizer)
        split = {"posts": rows["sft"], "pairs": rows["preference"][: len(pairs)]}
        return split | {"CNN/DM pairs": rows["preference"][len(pairs) :]}

    ours = columns_of(())
    undone = columns_of(sum([x.undone for x in fitting], []))
    table = []
    for part, (kind, expected) in parts.items():
        responses = ("reference_response",) if kind == "sft" else ("chosen", "rejected")
        columns = ["query_token", *(f"{x}_token" for x in responses)]
        columns += [f"query_{x}_token{suffix}" for x in responses for suffix in ("", "_response_label")]
        made = [i for i, row in enumerate(expected) if row is not None]
        for column in columns:
            differ, left = (sum(rows[part][i][column] != expected[i][column] for i in made) for rows in (ours, undone))
            row = Row(f"tokens of {len(made)} {part}: {column}", "", "", differ, 0)
            told = [x for x in fitting if re.search(x.quantities, row.quantity)]
            if differ and told:
                row.undone = left
                row.reason = "; ".join(map(link, told))
            table.append(row)
    return table


def cnndm_pairs(posts: list[dict]) -> list[dict]:
    """Forty pairs in the form of CNN/DM's, their articles made of posts."""
    pairs = []
    for i in range(40):
        article = "\n\n".join(post["post"] for post in posts[5 * i : 5 * i + (2 if i % 2 else 9)])
        if i % 4 == 0:
            article = article.replace("\n", " ")
        info = {"id": str(i), "post": None, "title": None, "subreddit": None, "site": "cnn", "article": article}
        summaries = [
            {"text": " " + posts[i + j]["summary"], "policy": ("ref", "sup1")[j], "note": None} for j in (0, 1)
        ]
        pair = {"info": info, "summaries": summaries, "choice": i % 2, "worker": "w", "batch": "cnndm0"}
        pairs.append(pair | {"split": "valid1", "extra": {"confidence": 5}})
    return pairs


def make_data(args: Args) -> tuple[str, str]:
    """Short real posts and pairs, tokenised: the SFT and the preference data of all runs."""
    work = Path(args.work)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    posts = raw_rows(args, "tldr_posts", ("train", "validation"))
    pairs = raw_rows(args, "tldr_comparisons", ("train",))

    def short(*texts: str) -> bool:
        return all(len(tokenizer(text).input_ids) < 36 for text in texts)

    posts = [row for row in posts if short(row["title"], row["summary"])]
    pairs = [row for row in pairs if short(row["info"]["title"], *(summary["text"] for summary in row["summaries"]))]
    for name, rows, size in (("posts", posts, 96), ("pairs", pairs, 64)):
        (work / "raw" / name).mkdir(parents=True, exist_ok=True)
        for split, part in (("train", rows[:size]), ("validation", rows[size : size + 8])):
            text = "".join(json.dumps(row) + "\n" for row in part)
            (work / "raw" / name / f"{split}.jsonl").write_text(text)
    return our_side.make_data(work, work / "raw/posts", work / "raw/pairs", args.tokenizer, LIMITS)


def other_orders(batches: list[dict], orders: int) -> list[list[dict]]:
    """The same batches, and then with their rows in other orders."""
    runs = [batches]
    for seed in range(orders):
        generator = torch.Generator().manual_seed(seed)
        permuted = []
        for batch in batches:
            n = len(next(iter(batch.values())))
            order = torch.randperm(n, generator=generator)
            permuted.append({key: value[order] for key, value in batch.items()})
        runs.append(permuted)
    return runs


def stage(args: Args, name: str, title: str, job: dict, columns: list[str], data: str, **more) -> list[Row]:
    """SFT, reward model or DPO: four updates of eight rows."""
    work = Path(args.work)
    batches = our_side.batches(f"{name}.py", work, Path(data), 8, 4, columns)
    runs = theirs(
        args, title, kind=name, model=job["model"], learning_rate=args.learning_rate,
        runs=other_orders(batches, args.orders), **more,
    )  # fmt: skip
    arguments = {"seed": 1, "total_episodes": 32, "batch_size": 8, "micro_batch_size": 8}
    job = job | more | {"arguments": arguments | {"learning_rate": args.learning_rate}}

    def again(patches):
        return getattr(our_side, name)(work, patches, job)

    rows = compare(title, again(()), runs)
    explain(rows, title, again, runs, f"{name}.py")
    return rows


def sft(args: Args, job: dict) -> list[Row]:
    return stage(args, "sft", "SFT", job, ["query_reference_response_token"], job["sft_data"])


def reward(args: Args, job: dict) -> list[Row]:
    """Training, centring, a new head, and the format of their released models both ways."""
    work = Path(args.work)
    generator = torch.Generator().manual_seed(4)
    hidden = json.loads(Path(job["model"], "config.json").read_text())["hidden_size"]
    more = {"head": torch.randn(1, hidden, generator=generator) / (hidden + 1) ** 0.5}
    every = torch.arange(96)
    more["references"] = our_side.rows_of(Path(job["sft_data"]), every)["query_reference_response_token"]
    more["save"] = str(work / "their_reward")
    columns = ["query_chosen_token", "query_rejected_token"]
    rows = stage(args, "reward", "reward model", job, columns, job["pair_data"], **more)
    model = job["model"]
    runs = theirs(args, "head", kind="head_initialisation", model=model)
    rows += compare("reward model", our_side.head_initialisation(work, model), runs)
    key = "rewards of a model of ours in their format"
    weights = our_side.load_file(work / "run_reward/model/model.safetensors")
    weights["score.bias"] = -our_side.reward_mean(work / "run_reward/model").float()
    runs = theirs(args, "format", kind="rewards_of_ours", model=model, weights=weights, references=more["references"])
    ours = {key: our_side.rewards(work, work / "run_reward/model", more["references"])}
    trained = [run["centred rewards of the references"] for run in torch.load(work / "reward model.theirs.pt")]
    runs += [{key: runs[0][key] + other - trained[0]} for other in trained[1:]]  # the floor is that of their training
    rows += compare("reward model", ours, runs)
    convert(args)
    key = "rewards of their released format, converted"
    runs = [{key: rewards} for rewards in trained]
    rows += compare("reward model", {key: our_side.rewards(work, work / "converted", more["references"])}, runs)
    return rows


def convert(args: Args):
    """Their reward model in our format, by benchmark/convert_released.py."""
    work = Path(args.work).resolve()
    command = [sys.executable, str(Path(__file__).parents[1] / "convert_released.py")]
    command += ["--source", str(work / "their_reward"), "--output-dir", str(work / "converted")]
    subprocess.run(["rm", "-rf", str(work / "converted")], check=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        fail(f"convert_released.py failed: {done.stderr[-2000:]}")


def dpo(args: Args, job: dict) -> list[Row]:
    rows = []
    columns = ["query_chosen_token", "query_rejected_token"]
    columns += [f"{column}_response_label" for column in columns]
    for title, ipo, smoothing in (("DPO", False, 0.0), ("IPO", True, 0.0), ("DPO, label smoothing 0.1", False, 0.1)):
        more = {"ipo": ipo, "label_smoothing": smoothing}
        rows += stage(args, "dpo", title, job, columns, job["pair_data"], **more)
    return rows


def ppo(args: Args, job: dict) -> list[Row]:
    """Three updates of four passes: plain, with whitened rewards, with two mini-batches."""
    if not Path(args.work, "converted").exists():
        fail("--only ppo needs the reward model: --only reward ppo")
    rows = ppo_case(args, job, "PPO", False, 1)
    rows += ppo_case(args, job, "PPO, whitened rewards", True, 1)
    return rows + ppo_case(args, job, "PPO, two mini-batches", False, 2)


def ppo_case(args: Args, job: dict, title: str, whiten_rewards: bool, mini_batches: int) -> list[Row]:
    work = Path(args.work)
    run = ppo_run(args, job, mini_batches)
    settings = {"whiten_rewards": whiten_rewards, "num_mini_batches": mini_batches}
    runs = theirs(
        args,
        title,
        kind="ppo",
        model=job["model"],
        reward_model=str(work / "their_reward"),
        learning_rate=args.learning_rate,
        runs=ppo_orders(run, args.orders, mini_batches),
        **settings,
    )
    arguments = {"seed": 1, "total_episodes": 48, "batch_size": 16, "micro_batch_size": 16 // mini_batches}
    arguments |= {"response_length": RESPONSE_LENGTH, "learning_rate": args.learning_rate}
    own = job | run | {"arguments": arguments | settings, "converted_reward_model": str(work / "converted")}

    def again(patches):
        return our_side.ppo(work, patches, own)

    rows = compare(title, again(()), runs)
    explain(rows, title, again, runs, "ppo.py")
    return rows


def ppo_run(args: Args, job: dict, mini_batches: int) -> dict:
    """Queries, responses and permutations of three updates. Responses are random tokens, with EOS where `ends`
    says, and in the last rows nowhere."""
    work = Path(args.work)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    batches = our_side.batches("ppo.py", work, Path(job["sft_data"]), 16, 3, ["query_token"])
    generator = torch.Generator().manual_seed(9)
    last = RESPONSE_LENGTH - 1
    ends = [[0], [0, 5], [1], [7], [7, 15], [last - 1], [last], [last], [12], [3, last], [20], [16]]
    run = {"queries": [], "responses": [], "permutations": [], "back": torch.arange(16)}
    for update, batch in enumerate(batches, 1):
        responses = torch.randint(1, len(tokenizer), (16, RESPONSE_LENGTH), generator=generator)
        responses[responses == tokenizer.eos_token_id] = 5
        for row, places in enumerate(ends):
            responses[row, places] = tokenizer.eos_token_id
        run["queries"].append(batch["query_token"])
        run["responses"].append(responses)
        run["permutations"] += our_side.ppo_permutations(work, 16, update, 4)
    return run


def ppo_orders(run: dict, orders: int, mini_batches: int) -> list[dict]:
    """The run, and runs with the rows of each batch in another order and those of each mini-batch, too."""
    runs = [run]
    for seed in range(orders):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(16, generator=generator)  # row i of the other run is row order[i] of the first
        back = order.argsort()
        permutations = []
        for permutation in run["permutations"]:
            parts = [part[torch.randperm(len(part), generator=generator)] for part in permutation.chunk(mini_batches)]
            permutations.append(back[torch.cat(parts)])
        other = {"queries": [x[order] for x in run["queries"]], "responses": [x[order] for x in run["responses"]]}
        runs.append(other | {"permutations": permutations, "back": back})
    return runs


# ---- the table ----------------------------------------------------------------------------------------------------


def ensembles(args: Args) -> list[Row]:
    """The ensemble paper's objectives, of best of n and of PPO, and its best-of-n estimator, on random scores."""
    names = ["mean_objective_function", "worst_case_optimization", "uncertainty_weighted_optimization"]
    best, in_ppo = {"np": numpy, "scipy": scipy}, {"torch": torch}
    wanted = [(names, best), (["unbiased_sampler"], best), (names, in_ppo)]
    for file, (functions, namespace) in zip(ENSEMBLE_HASHES, wanted, strict=True):
        module = ast.parse(Path(args.ensemble_authors, file).read_text())
        their_side.definitions(module, file, functions, namespace)
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(5, 200, generator=generator, dtype=torch.float64)
    gold = torch.randn(200, generator=generator, dtype=torch.float64)
    numbers = (1, 2, 7, 50, 200)
    mean, wco, uwo = (best[name] for name in names)
    columns = scores.T.numpy()
    found = {"mean": [mean(x) for x in columns], "WCO": [wco(x) for x in columns]}
    found["UWO"] = [uwo(x, 0.5) for x in columns]
    found["UWO in PPO"] = in_ppo[names[2]](scores, 0.5)
    order = scores.mean(0).argsort()
    question = {"proxy_scores": scores.mean(0)[order].tolist(), "gold_scores": gold[order].tolist()}
    estimates = [best["unbiased_sampler"]([question], n, 200) for n in numbers]
    found["best of n, objective"] = [proxy for _, proxy in estimates]
    found["best of n, gold"] = [value for value, _ in estimates]
    runs = [{key: torch.tensor([float(x) for x in value], dtype=torch.float64) for key, value in found.items()}]

    def again(patches):
        return our_side.ensembles(Path(args.work), patches, scores, gold, numbers)

    rows = compare("ensembles", again(()), runs)
    explain(rows, "ensembles", again, runs, "ensembles/ppo.py")
    return rows


def findings(args: Args, job: dict) -> list[str]:
    """What their per-device statistics and their bfloat16 do, with the settings of their launch scripts."""
    lines = [
        "",
        "## Beyond the comparison",
        "",
        "Theirs whitens advantages per device and takes means per micro-batch. The gradient of the first step of 512",
        "episodes so, against that of the whole batch, on the small model; and the ratio before the first step under",
        "bfloat16 autocast on a CPU, old log-probabilities in groups of their rollout, new ones in micro-batches.",
        "",
        "| launch | devices x micro-batch x accumulation | cosine, policy | value model | mean off ratio 1 | largest |",
        "|---|---|---|---|---|---|",
    ]
    for size, (devices, micro, accumulation, _) in our_side.LAUNCHES.items():
        policy, value = our_side.per_device_gradients(Path(args.work), job, size)
        ratio = our_side.bfloat16_ratios(Path(args.work), job, size)
        numbers = f"{policy:.4f} | {value:.4f} | {ratio['mean']:.1e} | {ratio['largest']:.1e}"
        lines.append(f"| {size} | {devices} x {micro} x {accumulation} | {numbers} |")
        console.print(lines[-1])
    return lines


def markdown(rows: list[Row], args: Args, seconds: float) -> str:
    command = " ".join(["python", *sys.argv])
    lines = [
        "# The authors' code beside ours",
        "",
        f"`{command}`: {seconds / 60:.0f} minutes, torch {torch.__version__}, one thread of a CPU.",
        f"Theirs: vwxyzjn/summarize_from_feedback_details at {COMMIT}, on transformers 4.33.2 and tokenizers 0.13.3.",
        "The ensemble paper's: tlc4418/llm_optimization at 416b03c." if args.ensemble_authors else "",
        "",
        "A bound is ten times the largest difference between two runs of the authors' code that differ only in the",
        f"order of the rows in a mini-batch ({args.orders} orders), and at least 1e-6 of the largest value. For",
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
    """A difference of values, or a count of rows."""
    return f"{value} rows" if isinstance(value, int) else f"{value:.1e}"


def prepare(args: Args) -> dict:
    """Models and data of all runs; the job that every part begins with."""
    check_folders(args)
    args.tokenizer = str(Path(args.tokenizer).resolve())
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    sft_data, pair_data = make_data(args)
    theirs(args, "models", kind="make_models", folder=str(work.resolve()), tokenizer=args.tokenizer)
    return {"model": str((work / "policy").resolve()), "sft_data": sft_data, "pair_data": pair_data}


def main(args: Args):
    start = time.time()
    torch.set_num_threads(1)
    job = prepare(args)
    parts = {"tokens": lambda: tokens(args), "ensembles": lambda: ensembles(args)}
    for name, part in (("sft", sft), ("reward", reward), ("dpo", dpo), ("ppo", ppo)):
        parts[name] = lambda part=part: part(args, job)
    rows, told = [], []
    for name in args.only:
        if name == "ensembles" and not args.ensemble_authors:
            continue
        if name == "findings":
            told = findings(args, job)
            continue
        found = parts[name]()
        rows += found
        wrong = [row for row in found if not row.stands()]
        console.print(f"{name}: {len(found)} quantities, {len(wrong)} above their bounds without a reason")
        for row in wrong:
            console.print(f"  {row.quantity}: {row.difference:.1e} above {row.bound:.1e}, undone {row.undone}")
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(args.output).write_text(markdown(rows, args, time.time() - start) + "\n".join([*told, ""]))
    console.print(f"{args.output}: {len(rows)} quantities in {time.time() - start:.0f} s")
    if any(not row.stands() for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main(tyro.cli(Args))
