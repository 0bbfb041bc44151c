"""Tables and curves of benchmark/pretrained.md from the runs of benchmark/pretrained.sh.

    python benchmark/pretrained.py --runs runs/pretrained/NAME --data data/pretrained/NAME/tldr
    python benchmark/pretrained.py       # only prints and draws what is in --output

Writes to --output: policies.csv (a row a policy), baselines.csv (the same beside texts that no policy wrote, on the
posts for which a summary of OpenAI's 1.3B PPO model is known), pairs.csv (reward model and DPO on the validation
pairs), calibration.csv, curves.csv, invented.csv (what each makes of benchmark/invented_posts.jsonl) and curves.png. A
policy without samples is left out, and so are KL and scores of baselines where the models are gone. Two more flags do
a step of pretrained.sh and nothing else.

ROUGE is that of the validation posts at temperature 0.01. Intervals are 95 %: bootstrap over posts, Wilson for shares
of pairs. A response without EOS scores -1, as in training (Detail 23): the reward model has only seen responses that
end. The KL to the SFT model is of one more sample a post at the training temperature. A copied word is a word of the
summary that the shortened post has too; a copied 4-gram, four words in a row.
"""

import json
import os
import re
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median

os.environ["MPLBACKEND"] = "agg"  # the backend that a notebook chooses may not be installed here

import pandas
import torch
import tyro
from accelerate import Accelerator
from datasets import load_from_disk
from matplotlib.figure import Figure
from PIL import Image
from rouge_score.rouge_scorer import RougeScorer
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT), str(ROOT / "eval"), str(ROOT / "quickstart")]

from eval_helpers import log_ratios, markdown, read_metrics, wilson, wins  # noqa: E402
from report import bootstrap_interval  # noqa: E402
from rm_report import calibration  # noqa: E402

import ppo  # noqa: E402
from tldr_dataset import unfinished_folder  # noqa: E402

POLICIES = {"zero_shot": "as shipped", "sft": "SFT", "dpo": "DPO", "ppo": "PPO", "ppo_lam_095": "PPO, lambda 0.95"}
POLICIES |= {"rloo": "RLOO"}
ONLINE = ["ppo", "ppo_lam_095", "rloo"]
BASELINES = {"title": "the post's title", "lead_1": "its first sentence", "lead_2": "its first two sentences"}
BASELINES |= {"reference": "the reference", "openai": "OpenAI's 1.3B PPO"}
OPENAI = "openai_ppo_1.3b"  # policy of the pairs
PANELS = {
    "objective/score": "score",
    "objective/kl": "KL to SFT, nats a response",
    "response/length": "tokens a response",
}
PANELS |= {"response/eos_rate": "share that ends with EOS"}
CURVES = {  # stage -> metrics that curves.csv keeps
    "sft": ["loss/train", "eval/loss"],
    "reward": ["loss/train", "accuracy/train"],
    "dpo": ["loss/train", "accuracy/train"],
    **{stage: [*PANELS, "value/mean", "loss/value", "policy/first_ratio_deviation"] for stage in ONLINE},
}


@dataclass
class Args:
    runs: Path | None = None
    """folder with sft, reward, dpo, ppo, rloo and samples"""
    data: Path | None = None
    """folder of tldr_dataset.py that they were trained on"""
    held_out: Path | None = None
    """write the pairs of --data here, those for training without the posts of the SFT data's validation and test"""
    newest_checkpoint: str = ""
    """stage of --runs whose newest checkpoint becomes a policy, in its checkpoints/policy"""
    output: Path = ROOT / "benchmark" / "results" / "pretrained"
    """folder of the tables and the picture"""


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


def copied(summary: str, source: str, n: int) -> float | None:
    """Return the share of the summary's n-grams of words that the source has too; None if it has none."""
    grams, known = (
        [tuple(text[i : i + n]) for i in range(len(text) - n + 1)] for text in map(words_of, (summary, source))
    )
    return fmean(gram in set(known) for gram in grams) if grams else None


def source_of(query: str) -> str:
    """Return the part of its post that a query keeps."""
    return query.split("\nPOST: ", 1)[1].removesuffix("\n\nTL;DR:")


# ---- steps of pretrained.sh -----------------------------------------------------------------------------------------


def write_held_out(args: Args):
    """Write the pairs, those for training without the posts that the policies are measured on."""
    posts, pairs = load_from_disk(args.data / "sft"), load_from_disk(args.data / "preference")
    measured = {query for split in ("validation", "test") if split in posts for query in posts[split]["query"]}
    before = len(pairs["train"])
    pairs["train"] = pairs["train"].filter(lambda query: query not in measured, input_columns="query")
    with unfinished_folder(args.held_out) as folder:
        pairs.save_to_disk(folder / "finished")
    print(f"{args.held_out}: {len(pairs['train'])} of {before} training pairs are on other posts than the evaluation's")


def policy_of_checkpoint(run: Path):
    """Write the policy of a run's newest checkpoint, which holds policy and value model (--save-every), beside it."""
    newest = max(run.glob("checkpoints/update_??????"))
    start = ppo.local_checkpoint("--sft-model-path", json.loads((run / "args.json").read_text())["sft_model_path"])
    tokenizer = ppo.load_tokenizer(start)
    policy = ppo.load_policy(start, tokenizer)
    weights = load_file(newest / "model.safetensors")
    own = {name.removeprefix("policy."): value for name, value in weights.items() if name.startswith("policy.")}
    report = policy.load_state_dict(own or weights, strict=False)
    if report.unexpected_keys or set(report.missing_keys) - {"lm_head.weight"}:  # which may be tied to the embedding
        raise SystemExit(f"error: {newest} does not hold the weights of {start}: {report}")
    policy.save_pretrained(run / "checkpoints" / "policy")
    tokenizer.save_pretrained(run / "checkpoints" / "policy")
    print(f"{run}/checkpoints/policy is the policy after {newest.name.replace('_', ' ')}")


# ---- from the runs ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def kl_to_sft(accelerator, policy, sft, tokenizer, queries: torch.Tensor) -> torch.Tensor:
    """Return log pi - log pi_sft (n,), summed over the tokens of a response that the policy samples to each query (n,
    Q)."""
    args = ppo.Args(sample_batch_size=32, response_length=53)
    keys = ppo.noise_keys(1, -2, range(len(queries)), args.response_length)  # training never has an update -2
    responses, _ = ppo.sample(accelerator, policy, queries, keys, tokenizer, args, args.temperature)
    return log_ratios(policy, sft, ppo.make_batch(queries, responses, tokenizer.pad_token_id), args.temperature)


def samples_of(args: Args, stage: str, what: str = "tldr") -> pandas.DataFrame:
    """Return a policy's samples for the validation posts, with -1 as the score of one without EOS (Detail 23)."""
    file = args.runs / "samples" / what / stage / "eval" / "samples_validation.csv"
    rows = pandas.read_csv(file, keep_default_na=False)
    rows["score"] = rows["score"].where(rows["has_eos"], -1.0)
    return rows


def policy_row(args: Args, stage: str, accelerator, sft, tokenizer, posts) -> dict:
    """Return means over the validation posts of one policy's samples, and the time of its training."""
    rows = samples_of(args, stage)
    sources = [source_of(query) for query in rows["query"]]
    row = {"policy": stage, "posts": len(rows)}
    for metric in ("rouge1", "rougeL", "score"):
        row[metric] = rows[metric].mean()
        row[f"{metric}_low"], row[f"{metric}_high"] = bootstrap_interval(list(rows[metric]), 2_000)
    row["words"] = fmean(len(words_of(text)) for text in rows["response"])
    for n in (1, 4):
        shares = [copied(text, source, n) for text, source in zip(rows["response"], sources, strict=True)]
        row[f"copied_{n}"] = fmean(share for share in shares if share is not None)
    row["eos_rate"] = rows["has_eos"].mean()
    row["questions"] = fmean(text.rstrip().endswith("?") for text in rows["response"])
    if stage not in ("zero_shot", "sft"):
        folders = [args.runs / stage / name for name in ("model", "checkpoints/policy")]
        folders = [str(folder) for folder in folders if folder.exists()]
    if stage not in ("zero_shot", "sft") and sft and folders:
        policy = ppo.load_policy(folders[0], tokenizer)
        with accelerator.autocast():
            kl = kl_to_sft(accelerator, policy, sft, tokenizer, posts["query_token"][:])
        row |= {"kl": kl.mean().item(), "kl_error": (kl.std() / len(kl) ** 0.5).item()}
    if stage != "zero_shot":
        metrics = read_metrics(args.runs / stage)
        updates = [line["time/update"] for line in metrics if "time/update" in line]
        row |= {"items": metrics[-1]["episode"], "updates": len(updates), "seconds_an_update": median(updates)}
    return row


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a text: they end with . ! or ? before white space, or with a line."""
    return [part.strip() for part in re.split(r"(?<=[.!?])\s+|\n+", text) if part.strip()]


def texts_without_a_policy(args: Args) -> pandas.DataFrame:
    """Return the texts of BASELINES for each validation post whose pairs hold a summary by OPENAI, and whether such a
    pair is one that reward model and DPO were trained on: a column each, a row a post in the order of the data."""
    written = {}  # post's query -> OpenAI's summary
    for rows in load_from_disk(args.data / "preference").values():
        for side in ("chosen", "rejected"):
            of_model = rows.filter(lambda name: name == OPENAI, input_columns=f"{side}_policy")
            for row in of_model.select_columns(["query", "summaries", "choice"]):
                index = row["choice"] if side == "chosen" else 1 - row["choice"]
                written[row["query"]] = row["summaries"][index]["text"]
    table = []
    for row in load_from_disk(args.data / "sft")["validation"]:
        if row["query"] in written:
            lines = sentences_of(row["post"])
            texts = {"title": row["title"], "lead_1": " ".join(lines[:1]), "lead_2": " ".join(lines[:2])}
            texts |= {"reference": row["summary"], "openai": written[row["query"]]}
            table.append({"id": row["id"], "query": row["query"]} | {key: text.strip() for key, text in texts.items()})
    return pandas.DataFrame(table)


def baseline_rows(args: Args, known: list[str], accelerator, tokenizer) -> list[dict]:
    """Return ROUGE-L, words and the reward model's score of texts that no policy here wrote, and of the policies' own
    samples, on the same posts; [] if no summary by OPENAI is known."""
    texts = texts_without_a_policy(args)
    if texts.empty:
        return []
    reward_model = None
    if (args.runs / "reward" / "model").exists():
        reward_model = ppo.load_reward_model(str(args.runs / "reward" / "model"), tokenizer).to(accelerator.device)
    queries = load_from_disk(args.data / "sft").with_format("torch")["validation"]
    index = [i for i, query in enumerate(queries["query"]) if query in set(texts["query"])]
    queries = queries[index]["query_token"].to(accelerator.device)
    settings = ppo.Args(micro_batch_size=16)
    rouge, table = RougeScorer(["rougeL"]), []
    for name in [*BASELINES, *known]:
        if name in BASELINES:
            summaries, scores = texts[name], []
        if name in BASELINES and reward_model:
            ended = [f" {text}{tokenizer.eos_token}" for text in summaries]
            responses = tokenizer(ended, padding=True, padding_side="right", return_tensors="pt").input_ids
            batch = ppo.make_batch(queries, responses.to(accelerator.device), tokenizer.pad_token_id)
            scores = ppo.reward_scores(accelerator, reward_model, batch, settings).tolist()
        elif name in known:
            rows = samples_of(args, name).iloc[index]
            summaries, scores = rows["response"], list(rows["score"])
        pairs = zip(texts["reference"], summaries, strict=True)
        rouges = [rouge.score(reference, summary)["rougeL"].fmeasure for reference, summary in pairs]
        row = {"text": name, "posts": len(texts), "words": fmean(len(words_of(text)) for text in summaries)}
        for metric, values in (("rougeL", rouges), ("score", scores)):
            if not values:
                continue
            row[metric] = fmean(values)
            row[f"{metric}_low"], row[f"{metric}_high"] = bootstrap_interval(values, 2_000)
        table.append(row)
    return table


def agreement_rows(args: Args) -> tuple[list[dict], list[dict]]:
    """Return the agreement of reward model and DPO with the validation pairs by who judged them, beside two rules of
    thumb, and the reward model's calibration."""
    pairs = load_from_disk(args.data / "preference")["validation"]
    longer = [len(words_of(a)) - len(words_of(b)) for a, b in zip(pairs["chosen"], pairs["rejected"], strict=True)]
    hits = {"the longer summary": [0.5 if gap == 0 else float(gap > 0) for gap in longer]}
    of_policy = "the policy's, not the reference"
    hits[of_policy] = [float(policy != "ref") for policy in pairs["chosen_policy"]]
    both = zip(pairs["chosen_policy"], pairs["rejected_policy"], strict=True)
    has_reference = [(a is not None and b is not None) and (a == "ref") != (b == "ref") for a, b in both]
    for stage, name in (("reward", "reward model"), ("dpo", "DPO, implicit")):
        rewards = pandas.read_csv(args.runs / stage / "eval" / "pairs_validation.csv")
        gaps = (rewards["chosen_reward"] - rewards["rejected_reward"]).to_numpy()
        hits[name] = list(wins(rewards["chosen_reward"], rewards["rejected_reward"]))
        if stage == "reward":
            bins, error = calibration(gaps, 5)
    table = []
    judges = ["a language model" if batch == "ai_judged" else "people" for batch in pairs["batch"]]
    for judge, name in product(("a language model", "people"), hits):
        if rows := [i for i, by in enumerate(judges) if by == judge and (name != of_policy or has_reference[i])]:
            values = hits[name]
            right = sum(values[i] for i in rows)
            low, high = wilson(right, len(rows))
            row = {"judged by": judge, "pairs": len(rows), "rule": name, "agreement": right / len(rows)}
            as_longer = fmean(values[i] == hits["the longer summary"][i] for i in rows)
            table.append(row | {"low": low, "high": high, "as_longer": as_longer})
    return table, [row | {"error": error} for row in bins]


def collect_curves(args: Args):
    """Write curves.csv from the runs that are there."""
    rows = []
    for stage, metrics in CURVES.items():
        for line in read_metrics(args.runs / stage) if (args.runs / stage).exists() else []:
            place = {"stage": stage, "update": line["update"], "episode": line.get("episode", 0)}
            rows += [place | {"metric": key, "value": line[key]} for key in [*metrics, "time/update"] if key in line]
    pandas.DataFrame(rows).to_csv(args.output / "curves.csv", index=False, float_format="%.6g")


def collect(args: Args):
    """Write every other table of --output."""
    precision = json.loads((args.runs / "sft" / "args.json").read_text())["mixed_precision"]
    accelerator = Accelerator(mixed_precision=precision or "no")
    folder = str(args.runs / "sft" / "model")
    tokenizer = sft = None
    if Path(folder).exists():
        tokenizer = ppo.load_tokenizer(folder)
        sft = ppo.load_policy(folder, tokenizer)
    posts = load_from_disk(args.data / "sft").with_format("torch", ["query_token"], output_all_columns=True)[
        "validation"
    ]
    shares = [len(source_of(row["query"])) / len(row["post"]) for row in posts]
    known = [name for name in POLICIES if (args.runs / "samples" / "invented" / name / "eval" / "rouge.csv").exists()]
    table = [policy_row(args, stage, accelerator, sft, tokenizer, posts) for stage in known]
    kept = {"kept_median": median(shares), "kept_whole": fmean(share == 1 for share in shares)}
    table = [row | kept for row in table]
    pairs, bins = agreement_rows(args)
    invented = {}
    for stage in known:
        for row in samples_of(args, stage, "invented").to_dict("records"):
            invented.setdefault(row["id"], {"id": row["id"], "reference": row["reference"]})[stage] = row["response"]
    tables = {"policies": table, "pairs": pairs, "calibration": bins, "invented": list(invented.values())}
    tables["baselines"] = baseline_rows(args, known, accelerator, tokenizer)
    for name, rows in tables.items():
        pandas.DataFrame(rows).to_csv(args.output / f"{name}.csv", index=False, float_format="%.6g")


# ---- from the tables -------------------------------------------------------------------------------------------------


def with_interval(row, name: str, digits: int = 3) -> str:
    if pandas.isna(row[name]):
        return ""
    low, high = (f"{row[key]:.{digits}f}" for key in (f"{name}_low", f"{name}_high"))
    return f"{row[name]:.{digits}f} ({low} to {high})"


def print_table(header: list[str], rows: list[list]):
    """Print a Markdown table."""
    print(markdown([dict(zip(header, row, strict=True)) for row in rows]))


def print_baselines(folder: Path):
    """Print the table of texts that no policy here wrote, where there is one."""
    if not (folder / "baselines.csv").exists() or not (folder / "baselines.csv").read_text().strip():
        return
    table = pandas.read_csv(folder / "baselines.csv")
    print(f"On the {table['posts'][0]} posts for which a summary by {BASELINES['openai']} is known:\n")
    names = BASELINES | POLICIES
    rows = [
        [names[row["text"]], with_interval(row, "rougeL"), f"{row['words']:.1f}", with_interval(row, "score", 2)]
        for _, row in table.iterrows()
    ]
    print_table(["", "ROUGE-L", "words", "score"], rows)


def print_page(folder: Path):
    """Print the page's tables in Markdown."""
    policies = pandas.read_csv(folder / "policies.csv")
    kept, whole = policies["kept_median"][0], policies["kept_whole"][0]
    print(f"Of a post's text {kept:.2f} is kept in the median; {whole:.2f} of the posts are whole.\n")
    rows = []
    for _, row in policies.iterrows():
        known = pandas.notna(row.get("kl"))
        cells = [POLICIES[row["policy"]], with_interval(row, "rouge1"), with_interval(row, "rougeL")]
        cells += [f"{row['words']:.1f}", f"{row['copied_1']:.2f}", f"{row['copied_4']:.2f}"]
        cells += [f"{row['questions']:.2f}", f"{row['eos_rate']:.2f}"]
        cells += [f"{row['kl']:.2f} ± {row['kl_error']:.2f}" if known else "", with_interval(row, "score", 2)]
        trained = row["items"] > 0
        cells += [f"{row['updates']:.0f}", f"{row['updates'] * row['seconds_an_update']:.0f}"] if trained else ["", ""]
        rows.append(cells)
    header = ["", "ROUGE-1", "ROUGE-L", "words", "copied words", "copied 4-grams"]
    header += ["ends with ?", "EOS", "KL to SFT", "score", "updates", "seconds"]
    print_table(header, rows)
    print_baselines(folder)
    pairs = pandas.read_csv(folder / "pairs.csv")
    rows = []
    for _, row in pairs.iterrows():
        cells = [*row[["judged by", "pairs", "rule"]]]
        cells.append(f"{row['agreement']:.2f} ({row['low']:.2f} to {row['high']:.2f})")
        rows.append([*cells, f"{row['as_longer']:.3f}"])
    print_table(["judged by", "pairs", "who decides", "agreement", "same as the longer"], rows)
    bins = pandas.read_csv(folder / "calibration.csv")
    rows = []
    for _, row in bins.iterrows():
        cells = [f"{row['pairs']:.0f}", f"{row['from']:.2f} to {row['to']:.2f}"]
        rows.append([*cells, f"{row['chance']:.3f}", f"{row['accuracy']:.3f}"])
    print_table(["pairs", "score difference", "chance that it gives", "accuracy"], rows)
    print(f"Expected calibration error {bins['error'][0]:.3f}.\n")
    for _, row in pandas.read_csv(folder / "invented.csv", keep_default_na=False).iterrows():
        names = {"reference": "reference"} | POLICIES
        print_table([row["id"], ""], [[name, " ".join(row[key].split())] for key, name in names.items() if key in row])


def draw_runs(folder: Path):
    """Draw curves.png: the loss of SFT, the reward model's accuracy in training, and PPO and RLOO over their
    episodes."""
    curves = pandas.read_csv(folder / "curves.csv")
    figure = Figure(figsize=(13, 6.5))
    axes = figure.subplots(2, 3).flat
    axis = next(axes)
    for metric, style, label in (("loss/train", "-", "training batch"), ("eval/loss", "o", "validation")):
        rows = curves[(curves["stage"] == "sft") & (curves["metric"] == metric)]
        axis.plot(rows["episode"], rows["value"], style, label=label)
    axis.set_title("SFT: nats a token")
    axis = next(axes)
    for stage, label in (("reward", "reward model"), ("dpo", "DPO")):
        rows = curves[(curves["stage"] == stage) & (curves["metric"] == "accuracy/train")]
        axis.plot(rows["episode"], rows["value"].rolling(8, min_periods=1).mean(), label=label)
    axis.axhline(0.5, color="grey", linewidth=0.8)
    axis.set_title("training pairs decided right (mean of eight batches)")
    for metric, title in PANELS.items():
        axis = next(axes)
        for i, stage in enumerate(ONLINE):
            rows = curves[(curves["stage"] == stage) & (curves["metric"] == metric)]
            if len(rows):
                axis.plot(rows["episode"], rows["value"], "o-", markersize=3, label=POLICIES[stage], color=f"C{i}")
        axis.set_title(title)
    for axis in figure.axes:
        axis.set_xlabel("posts, pairs or responses")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(folder / "curves.png", dpi=80)
    Image.open(folder / "curves.png").quantize(64).save(folder / "curves.png")


def main(args: Args):
    if args.held_out:
        write_held_out(args)
        return
    if args.newest_checkpoint:
        policy_of_checkpoint(args.runs / args.newest_checkpoint)
        return
    if args.runs:
        args.output.mkdir(parents=True, exist_ok=True)
        collect_curves(args)
        collect(args)
    print_page(args.output)
    draw_runs(args.output)


if __name__ == "__main__":
    main(tyro.cli(Args))
