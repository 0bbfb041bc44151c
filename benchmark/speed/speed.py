"""Items per second of the stage scripts, and of TRL's trainers or the authors' loops on the same rows: real lengths, a
random model.

    python benchmark/speed/speed.py sft reward dpo ppo                  # ours alone
    python benchmark/speed/speed.py ppo --script ppo_compile.py         # a copy
    python benchmark/speed/speed.py sft reward dpo --peer trl-1.16.0    # beside TRL; ppo: trl-1.11.0
    python benchmark/speed/speed.py sft reward --peer authors           # beside the authors' loops
    python benchmark/speed/speed.py ppo --batch-size 512 --micro-batch-size 16 --sample-batch-size 256    # one GPU

A peer has an environment of its own. TRL removed PPO in September 2026 (trl#7020), so 1.11 is the last to compare with:

    python3 -m venv .peers/trl-1.11.0 && .peers/trl-1.11.0/bin/pip install -r requirements.txt trl==1.11.0

    git clone https://github.com/vwxyzjn/summarize_from_feedback_details authors
    pip install --target old_libraries transformers==4.33.2 tokenizers==0.13.3      # Python 3.11 has wheels

The rows have the lengths of the posts and comparisons in --raw or, if that folder is missing, of generated ones,
stretched to the length of real posts. Words are numbers and the model is random, because what a model has learnt does
not change its speed. On a GPU it has Pythia 1B's shape. On a CPU it has the 1B's 16 layers, a width of 256 and 6,100
words, which keeps the 1B's ratio of body to head. EOS has a chance of about 1 in 70 at each position, so that responses
have about 37 of at most 53 tokens.

The first --warmup of a run's --updates do not count. Seconds are wall time from the end of one update to the end of the
next. The reference's log-probabilities of DPO are made before training, in both, and are not part of its time.
"""

import json
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from math import isfinite, log
from pathlib import Path
from typing import Annotated, Literal

import pandas
import torch
import tyro
from datasets import DatasetDict, Features, Sequence, Value, disable_progress_bars, load_from_disk
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    PreTrainedTokenizerFast,
)

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "eval")]

from eval_helpers import at_least, cores, fail  # noqa: E402

from reward import data_order  # noqa: E402

SHAPES = {"cpu": (256, 16, 8, 6_100), "cuda": (2_048, 16, 8, 50_304)}  # width, layers, heads, words with [PAD]
ITEMS = {"sft": "rows", "reward": "pairs", "dpo": "pairs", "ppo": "episodes"}
END_CHANCE = 1 / 70  # of EOS at each position
PHASES = ("sampling", "scoring", "update")  # of ppo
PASSES = {"sft": 3, "reward": 3, "dpo": 3, "ppo": 3 * 4}  # forward ones of an update's training; a backward pass is two


@dataclass
class Args:
    stages: Annotated[tuple[Literal["sft", "reward", "dpo", "ppo"], ...], tyro.conf.Positional]
    """stages to measure, one after the other"""
    script: str | None = None
    """a copy of the stage's script that runs in its place; default: the stage's own"""
    peer: Literal["none", "trl-1.16.0", "trl-1.11.0", "authors"] = "none"
    """also a run of this version of TRL, or of the authors' code (sft and reward on a CPU)"""
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    updates: int = 2
    """updates of a run"""
    warmup: int = 1
    """updates at the start of a run that do not count"""
    batch_size: int = 64
    """rows, pairs or episodes of an update"""
    micro_batch_size: int = 8
    """rows, pairs or episodes in a forward and backward pass, for both"""
    forward_batch_size: int = 8
    """rows, pairs or episodes in a pass without gradient, for the peer"""
    sample_batch_size: int = 32
    """episodes that ppo.py samples at a time"""
    raw: str = "../shared/data"
    """folder with tldr_posts/, tldr_comparisons/ and tokenizer/"""
    peers: str = ".peers"
    """folder of the peers' environments"""
    work: str = "data/speed"
    """folder for data and models; later calls with the same source of both use them again"""
    output: str = "runs/speed.csv"
    """file of the table"""


# ---- data and models ------------------------------------------------------------------------------------------------


def word_tokenizer(words: int):
    """Return a tokenizer of `words` - 1 words, `<|endoftext|>` (id 0) among them; [PAD] becomes the last id."""
    vocabulary = {"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, words - 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def with_pad(folder: Path):
    """Return a tokenizer with `[PAD]`, as the stages add it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return tokenizer


def in_words(data: DatasetDict, tokenizer, words: int, stretch: int) -> DatasetDict:
    """Return the same rows in numbered words, every token `stretch` times: EOS becomes 0, [PAD] the last id."""
    columns = [name for name in data["train"].column_names if name.endswith(("_token", "_label"))]

    def convert(token: int) -> list[int]:
        if token == tokenizer.pad_token_id:
            return [words - 1] * stretch
        return [1] * (stretch - 1) + [0] if token == tokenizer.eos_token_id else [1 + token % (words - 2)] * stretch

    def row(tokens_of: dict) -> dict:
        new = {name: [i for token in tokens_of[name] for i in convert(token)] for name in columns}
        return new | {"query": " ".join(f"w{i}" for i in new["query_token"] if i != words - 1)}

    features = data["train"].features | dict.fromkeys(columns, Sequence(Value("int32")))
    return DatasetDict({name: data[name].map(row, features=Features(features)) for name in ("train", "validation")})


def make_work(args: Args, work: Path):
    """Make work/sft, work/preference, work/few (data), work/model and work/reward (random models)."""
    width, layers, heads, words = SHAPES[args.device]
    raw, stretch = Path(args.raw), 1
    if not (raw / "tldr_posts").exists():
        raw, stretch = work / "raw", 3  # of posts of 90 tokens to the length of real ones
        counts = ["--num-train", 512, "--num-validation", 8, "--num-comparisons", 512]
        counts += ["--num-test", 8, "--num-validation-comparisons", 16, "--num-cnndm-comparisons", 16]
        call("quickstart/posts.py", "--output-dir", raw, *counts)
    posts, comparisons = ("tldr_posts", "tldr_comparisons") if stretch == 1 else ("posts", "comparisons")
    flags = ["--sft-dataset", raw / posts, "--preference-dataset", raw / comparisons]
    call("tldr_dataset.py", *flags, "--tokenizer", raw / "tokenizer", "--output-dir", work / "tldr")
    old = with_pad(raw / "tokenizer")
    tokenizer = word_tokenizer(words)
    data = {name: load_from_disk(str(work / "tldr" / name)) for name in ("sft", "preference")}
    write_data({name: in_words(rows, old, words, stretch) for name, rows in data.items()}, work)
    torch.manual_seed(1)
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": words}
    config = GPTNeoXConfig(**shape, intermediate_size=4 * width, bos_token_id=0, eos_token_id=0)
    with torch.device(args.device):  # 1B parameters are drawn on the GPU in no time
        model = GPTNeoXForCausalLM(config)
    set_end_chance(model, END_CHANCE)
    model.save_pretrained(work / "model")
    tokenizer.save_pretrained(work / "model")
    config.num_labels, config.pad_token_id = 1, words - 1
    with torch.device(args.device):
        reward_model = GPTNeoXForSequenceClassification(config)
    reward_model.save_pretrained(work / "reward")
    with_pad(work / "model").save_pretrained(work / "reward")


@torch.no_grad()
def set_end_chance(model, chance: float, temperature: float = 0.7):
    """Give token 0 (EOS) of a random model about this probability at every position, at the paper's temperature.

    With a bias of 0.5, the D entries of a hidden state sum to D / 2 and their squares to 1.25 D. The other V
    logits are then normal with mean 0 and variance 1.25 D x (standard deviation of the head's weights)^2, so that
    their exponentials sum to V x exp(variance / 2)."""
    head = model.get_output_embeddings().weight  # (V, D)
    words, width = head.shape
    variance = 1.25 * width * (model.config.initializer_range / temperature) ** 2  # of logits / temperature
    model.base_model.final_layer_norm.bias.fill_(0.5)
    head[0] = temperature * (log(chance * words) + variance / 2) / (0.5 * width)


def write_data(data: dict[str, DatasetDict], work: Path):
    """Write work/sft and work/preference with 8 rows of validation, and work/few with 8 rows of train."""
    for name, rows in data.items():
        few = rows["validation"].select(range(8))  # what is made of it does not count
        DatasetDict(train=rows["train"], validation=few).save_to_disk(str(work / name))
    train = data["sft"]["train"].select(range(8))  # the references that centre the reward model
    DatasetDict(train=train, validation=data["sft"]["validation"].select(range(8))).save_to_disk(str(work / "few"))


def call(script: str, *flags):
    subprocess.run([sys.executable, ROOT / script, *map(str, flags)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


# ---- runs -----------------------------------------------------------------------------------------------------------


# runs a script as if alone and ends with a line that says the most memory it had on the GPU
WITH_PEAK = """
import runpy, sys, torch
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print(f"peak of the GPU's memory: {torch.cuda.max_memory_allocated() / 2**30:.3f} GiB", flush=True)
"""


def stage_command(stage: str, args: Args, work: Path) -> list[str]:
    """Return the command of the stage script on the rows and models in `work`; on a GPU it prints its peak memory."""
    command = [sys.executable] if args.device == "cpu" else [sys.executable, "-c", WITH_PEAK]
    command += [args.script or f"{stage}.py"]
    command += ["--model", work / "model", "--output-dir", work / "runs" / stage]
    command += ["--batch-size", args.batch_size, "--micro-batch-size", args.micro_batch_size]
    command += ["--total-episodes", args.batch_size * args.updates]
    if stage != "dpo":
        command += ["--dataset", work / ("few" if stage == "reward" else "sft")]
    if stage != "sft":
        command += ["--sft-model-path", work / "model"]
    if stage in ("reward", "dpo"):
        command += ["--preference-dataset", work / "preference"]
    if stage == "ppo":
        command += ["--reward-model-path", work / "reward"]
        command += ["--sample-batch-size", args.sample_batch_size, "--eval-rows", 8]
    return [str(word) for word in command]


def run(command: list, log: Path, environment: dict | None = None) -> float:
    """Run a command to its end, with its output in a file. Returns its peak memory in GiB: the GPU's if it prints
    that (WITH_PEAK and trl_peer.py do), otherwise that of its process."""
    with log.open("w") as output:
        places = {"cwd": ROOT, "env": os.environ | (environment or {}), "stdout": output}
        child = subprocess.Popen([*map(str, command)], **places, stderr=subprocess.STDOUT)
    _, status, usage = os.wait4(child.pid, 0)
    text = log.read_text()
    if status:
        fail(f"{shlex.join(map(str, command))}\n{text[-3000:]}")
    on_gpu = re.search(r"peak of the GPU's memory: (.*) GiB", text)
    return float(on_gpu[1]) if on_gpu else usage.ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def ours(stage: str, args: Args, work: Path, *flags) -> dict:
    """Run the stage script with further flags. Returns seconds per counted update, peak GiB, the last update's loss
    and, of ppo, seconds of its phases."""
    folder = work / "runs" / stage
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    peak = run([*stage_command(stage, args, work), *flags], folder.with_suffix(".log"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    check_finite(stage, lines)
    of_update = {line["update"]: line for line in lines}
    counted = [of_update[update] for update in range(args.warmup + 1, args.updates + 1)]
    before = of_update[args.warmup]["time/total"] if args.warmup else 0.0
    seconds = (counted[-1]["time/total"] - before) / len(counted)
    measured = {"seconds": seconds, "peak": peak, "loss": counted[-1].get("loss/train")}
    if stage == "ppo":
        means = {key: statistics.fmean(line[key] for line in counted) for key in counted[0]}
        measured |= {"sampling": means["time/sampling"], "scoring": means["time/rollout"] - means["time/sampling"]}
        measured |= {"update": means["time/update"] - means["time/rollout"], "tokens": means["response/length"]}
        measured |= {"ratio": max(line["policy/first_ratio_deviation"] for line in lines)}
    return measured


def check_finite(name: str, lines: list[dict]):
    """End with an error if a metric of a run is not a finite number."""
    for line in lines:
        for key, value in line.items():
            if not isfinite(value):
                fail(f"{name}: {key} of update {line['update']} is {value}")


def peer(stage: str, args: Args, work: Path, *flags, **others) -> dict:
    """Run the peer in its own environment. Returns the same numbers, and the trainer's arguments. `others` are further
    settings of trl_peer.py or authors_peer.py."""
    is_trl = args.peer != "authors"
    needed = Path(args.peers, args.peer, "bin", "python") if is_trl else Path("authors")
    if not (ROOT / needed).exists():
        fail(f"{needed} is missing; the top of benchmark/speed/speed.py has the command that makes it")
    out = work / "runs" / f"{stage}_peer.json"
    settings = {"stage": stage, "work": str(work), "batch": args.batch_size, "micro": args.micro_batch_size}
    settings |= {"forward": args.forward_batch_size, "updates": args.updates, "device": args.device, "flags": flags}
    settings |= {"output": str(out), "reward": str(work / "reward"), "learning_rate": 3e-6} | others
    settings["rows"] = row_order(stage, args, work).tolist()
    python, script, environment = needed, "trl_peer.py", {}
    if not is_trl:
        python, script, environment = sys.executable, "authors_peer.py", {"PYTHONPATH": "old_libraries"}
        settings |= {"authors": str(needed), "pad": with_pad(work / "model").pad_token_id}
        settings |= {"rows_of": str(work / "runs" / "rows.pt"), "head": None} | others
        columns = {"sft": ["query_reference_response_token"], "reward": ["query_chosen_token", "query_rejected_token"]}
        name = "sft" if stage == "sft" else "preference"
        data = load_from_disk(str(work / name))["train"].select(settings["rows"]).with_format("torch")
        torch.save({column: torch.stack([*data[column]]) for column in columns[stage]}, settings["rows_of"])
    (work / "runs" / "peer.json").write_text(json.dumps(settings))
    command = [python, ROOT / "benchmark/speed" / script, work / "runs" / "peer.json"]
    peak = run(command, out.with_suffix(".log"), environment)
    measured = json.loads(out.read_text())
    seconds = (measured["ends"][args.updates] - measured["ends"][args.warmup]) / (args.updates - args.warmup)
    measured["loss"] = measured["losses"][args.updates - 1]
    return {"seconds": seconds, "peak": peak} | {key: measured[key] for key in ("loss", "arguments")}


def same_loss(stage: str, args: Args, work: Path) -> tuple[float, float]:
    """Return our loss and the peer's of the same small batch from the same weights: sft's first; reward's first under
    the head that ours drew; dpo's second after a long step, since its first is log 2 whatever the model says."""
    rate = {"sft": 3e-6, "reward": 0.0, "dpo": 1e-3}[stage]
    changed = {"updates": 2 if stage == "dpo" else 1, "warmup": 0, "batch_size": 2 * args.micro_batch_size}
    small = replace(args, **changed)
    own = ours(stage, small, work, "--learning-rate", rate)
    others = {}
    if stage == "reward":
        others = {"reward": str(work / "runs" / "reward" / "model"), "head": str(work / "runs" / "head.pt")}
        torch.save(load_file(Path(others["reward"], "model.safetensors"))["score.weight"], others["head"])
    return own["loss"], peer(stage, small, work, "sequential", learning_rate=rate, **others)["loss"]


def row_order(stage: str, args: Args, work: Path) -> torch.Tensor:
    """Return the indices of the rows that the stage script sees, in order, at its default seed."""
    data = load_from_disk(str(work / ("preference" if stage in ("reward", "dpo") else "sft")))["train"]
    return data_order(len(data), 44413, 0, args.batch_size * args.updates)


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def work_done(stage: str, args: Args, work: Path, response: float) -> tuple[float, float]:
    """Return the mean real tokens of a timed item, and the floating-point operations of one pass forward over them: 2 x
    parameters x tokens, the head where a loss reads it, and attention (4 x width x keys for each token). `response`: of
    PPO's."""
    config, pad_id = AutoConfig.from_pretrained(work / "model"), with_pad(work / "model").pad_token_id
    width, layers = config.hidden_size, config.num_hidden_layers
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    head = model.get_input_embeddings().weight.numel()
    body = sum(weights.numel() for weights in model.parameters() if weights.ndim == 2) - head

    def forward(query: float, *responses: float) -> float:
        # causal: on average a token sees half of its own part, and a response also sees the whole query
        tokens, keys = query + sum(responses), query**2 / 2 + sum(r * (query + r / 2) for r in responses)
        return 2 * body * tokens + 4 * layers * width * keys

    index = row_order(stage, args, work).tolist()[args.warmup * args.batch_size :]
    if stage in ("sft", "ppo"):
        data = load_from_disk(str(work / "sft"))["train"].select(index)
        query, own = (data[f"{x}_token"] for x in ("query", "reference_response"))
        lengths = [(real_length(q, pad_id), (real_length(r, pad_id),)) for q, r in zip(query, own, strict=True)]
    else:
        data = load_from_disk(str(work / "preference"))["train"].select(index)
        names = ("query_token", "query_chosen_token_response_label", "query_rejected_token_response_label")
        columns_of_lengths = [[real_length(row, pad_id) for row in data[name]] for name in names]
        lengths = [(query, (chosen, rejected)) for query, chosen, rejected in zip(*columns_of_lengths, strict=True)]
    total = 0.0
    for query, responses in lengths:
        if stage == "ppo":  # policy and value
            total += 2 * forward(query, response) + 2 * head * response
        else:
            head_tokens = {"sft": query + sum(responses), "reward": 0, "dpo": sum(responses)}[stage]
            total += forward(query, *responses) + 2 * head * head_tokens
    tokens = sum(q + (response if stage == "ppo" else sum(r)) for q, r in lengths)
    return tokens / len(lengths), total / len(lengths)


def real_length(ids: list[int], pad_id: int) -> int:
    return sum(i != pad_id for i in ids)


def matmul_rate(args: Args, work: Path, tokens: float) -> float:
    """Return the floating-point operations per second of (tokens of a micro-batch, width) x (width, inner width of the
    MLP), the largest product of a layer; the median of 30."""
    config, device = AutoConfig.from_pretrained(work / "model"), torch.device(args.device)
    width, inner = config.hidden_size, config.intermediate_size
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    n = int(tokens * args.micro_batch_size)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", cores())))  # as in the stages' processes
    a, b = torch.randn(n, width, device=device, dtype=dtype), torch.randn(width, inner, device=device, dtype=dtype)
    taken = []
    for _ in range(33):  # the first three do not count
        start = time.perf_counter()
        a @ b
        if args.device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return 2 * n * width * inner / statistics.median(taken[3:])


# ---- report ---------------------------------------------------------------------------------------------------------


def machine(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{(names or [platform.machine()])[0]}, {cores()} cores, torch {torch.__version__}"


def measure(stage: str, args: Args, work: Path) -> list[dict]:
    """Return the rows of a stage, ours and the peer's, and print them."""
    own = ours(stage, args, work)
    runs = {"ours": own}
    if args.peer != "none":
        runs[args.peer] = peer(stage, args, work, "precompute")  # the reference's log-probabilities, of dpo
    tokens, operations = work_done(stage, args, work, own.get("tokens", 0))
    rate = matmul_rate(args, work, tokens)
    table, command = [], shlex.join(["python", "benchmark/speed/speed.py", *sys.argv[1:]])
    for name, measured in runs.items():
        seconds = measured["seconds"]
        row = {"stage": stage, "who": name, "items/s": f"{args.batch_size / seconds:.3f} {ITEMS[stage]}"}
        row["real tokens/s"] = f"{args.batch_size * tokens / seconds:.0f}"
        row |= {"ours is faster by": "", "of a matrix product": ""}
        if name == "ours":
            done = PASSES[stage] * operations * args.batch_size
            row["of a matrix product"] = f"{done / measured.get('update', seconds) / rate:.2f}"
        else:
            row["ours is faster by"] = f"{seconds / own['seconds']:.2f}"
        row["peak GiB"] = f"{measured['peak']:.2f}"
        phases = [f"{phase} {measured[phase]:.2f} s" for phase in PHASES if phase in measured]
        row["seconds of an update"] = ", ".join(phases) or f"{seconds:.2f} s"
        table.append(row | {"command": f"`{command}`", "machine": machine(args.device)})
    print(f"{stage}: {tokens:.0f} real tokens an item, a matrix product: {rate / 1e9:.0f} GFLOP/s")
    if stage == "ppo":
        print(f"largest abs(ratio - 1) before a first step: {own['ratio']:g}")
    print(pandas.DataFrame(table).drop(columns=["command", "machine"]).to_string(index=False), flush=True)
    if args.peer != "none" and stage != "ppo":  # which samples
        print("loss of the same batch: ours {:.6f}, the peer's {:.6f}".format(*same_loss(stage, args, work)))
    return table


def main(args: Args):
    at_least(1, args, "batch_size", "micro_batch_size", "forward_batch_size", "sample_batch_size")
    at_least(0, args, "warmup")
    at_least(args.warmup + 1, args, "updates")
    os.chdir(ROOT)
    disable_progress_bars()
    if args.script and len(args.stages) > 1:
        fail("--script is a copy of one stage's script: name one stage")
    if args.peer.startswith("trl") and ("ppo" in args.stages) != (args.peer == "trl-1.11.0"):
        fail("ppo is compared with trl-1.11.0, the last version that has it, and the other stages with trl-1.16.0")
    if args.peer == "authors" and ({"ppo", "dpo"} & set(args.stages) or args.device != "cpu"):
        fail("the authors' loops are timed for sft and reward, on a CPU")
    settings = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(cores())}
    for key, value in (settings | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}).items():
        os.environ.setdefault(key, value)  # for ours and the peer's
    source = Path(args.raw if Path(args.raw, "tldr_posts").exists() else "/generated")
    work = Path(args.work, args.device, *source.resolve().parts[1:])  # a folder for each source
    if not (work / "reward" / "config.json").exists():
        make_work(args, work)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    table = []
    for stage in args.stages:
        table += measure(stage, args, work)
        pandas.DataFrame(table).to_csv(args.output, index=False)


if __name__ == "__main__":
    main(tyro.cli(Args))
