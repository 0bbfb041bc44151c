"""ensembles/ppo.py after "Reward Model Ensembles Help Mitigate Overoptimization", and eval/gold.py: with one member it
equals ppo.py, validation samples change nothing, and plain code gives the same gold rewards."""

import ast
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import torch
import tyro
from conftest import (
    ROOT,
    head_of,
    make_constant,
    make_talker,
    read_metrics,
    sample_by_hand,
    script,
    write_jsonl,
    write_program,
)
from datasets import load_from_disk
from eval_helpers import load_function
from kill_runs import weights
from transformers import AutoModel, AutoModelForCausalLM

import ppo as ppo_of_one
import reward

ppo = script("ensembles/ppo.py")
gold = script("eval/gold.py")
SEED, BATCH, UPDATES, ROWS, LENGTH, LAMBDA = 7, 8, 3, 7, 10, 0.5
FUNCTION = """
def score(post, summary):
    return len(post) / 100 - len(summary) / 7
"""


def run(args, module=ppo) -> Path:
    """One run in this process; returns its run folder."""
    module.main(replace(args))
    return Path(args.output_dir)


def without(lines: list[dict], *prefixes: str) -> list[dict]:
    """The lines without keys that begin so; lines of which nothing but update and episode is left go."""
    kept = [{key: value for key, value in line.items() if not key.startswith(prefixes)} for line in lines]
    return [line for line in kept if line.keys() - {"update", "episode"}]


def save_reward(folder: Path, base: Path, seed: int, away: float = 0.0) -> Path:
    """An untrained reward model whose head is drawn from the seed, so that members differ a good deal; its body is that
    of the base, or `away` of each weight's standard deviation from it."""
    tokenizer, generator = reward.load_tokenizer(str(base)), torch.Generator().manual_seed(seed)
    reward_model = reward.new_reward_model(str(base), tokenizer)
    model = reward_model.model
    with torch.no_grad():
        model.score.weight.normal_(generator=generator)
        for parameter in model.base_model.parameters() if away else []:
            parameter += away * parameter.std(correction=0) * torch.randn(parameter.shape, generator=generator)
        reward_model.bias.fill_(seed / 10)
    reward_model.to_transformers().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def setting(world, tmp_path_factory) -> SimpleNamespace:
    """.root, .sft, .members (two folders), .gold (folder), .function (path of FUNCTION), .common (arguments of both
    scripts) and .args(name, **changes): a run against both members."""
    root = tmp_path_factory.mktemp("ensembles")
    base = make_talker(world, root / "sft", eos=0.12)
    members = [save_reward(root / f"member_{seed}", base, seed) for seed in (1, 2)]
    gold = save_reward(root / "gold", base, 4)
    (root / "function.py").write_text(FUNCTION)
    common = {"model": "nano", "seed": SEED, "sft_model_path": str(base), "dataset": str(world.dataset)}
    common |= {"batch_size": BATCH, "eval_rows": ROWS, "total_episodes": BATCH * UPDATES, "response_length": LENGTH}
    common |= {"micro_batch_size": 4, "num_mini_batches": 2, "num_ppo_epochs": 2}
    common |= {"learning_rate": 1e-3, "sample_every": 0}

    def args(name: str, **changes):
        own = {"reward_model_paths": [str(x) for x in members], "reward_combination": "uwo", "uwo_lambda": LAMBDA}
        own |= {"value_start": "reward", "standardise_members": False}
        return ppo.Args(**common | own | {"output_dir": str(root / name)} | changes)

    found = {"sft": base, "members": members, "gold": gold, "function": f"{root / 'function.py'}:score"}
    return SimpleNamespace(root=root, common=common, args=args, **found)


@pytest.fixture(scope="module")
def single(setting) -> Path:
    """A run against the first member, with validation samples at updates 0 and 2."""
    one = {"reward_model_paths": [str(setting.members[0])], "reward_combination": "mean", "uwo_lambda": None}
    return run(setting.args("single", **one, eval_every=2, total_episodes=2 * BATCH))


@pytest.fixture(scope="module")
def golden(setting) -> Path:
    """A run against both members, with the frozen models in the machine's memory."""
    args = setting.args("golden", eval_every=2, offload=True)
    args = replace(args, lr_schedule="cosine", final_learning_rate=1e-4, penalty_reward_value=None)
    args.eval_temperature = 1.1
    return run(args)


# ---- one member, and a gold reward -------------------------------------------------------------------------------


def test_with_one_member_it_is_ppo_whether_validation_posts_are_sampled_or_not(setting, single):
    args = ppo_of_one.Args(**setting.common, reward_model_path=str(setting.members[0]), output_dir=f"{single}_plain")
    plain = run(replace(args, total_episodes=2 * BATCH), ppo_of_one)
    assert weights(single) == weights(plain) and len(weights(plain)) == 2
    lines, expected = read_metrics(single), without(read_metrics(plain), "time/", "eval/")
    assert all(line["objective/reward_model_variance"] == 0 for line in lines)
    assert all(line["objective/reward_model_1"] == line["objective/score_without_penalty"] for line in lines)
    assert without(lines, "eval/", "time/", "objective/reward_model") == expected
    assert 0 < expected[0]["response/eos_rate"] < 1
    assert expected[0]["objective/kl"] == 0 < 0.01 < expected[1]["objective/kl"]  # else nothing could have been changed
    assert sorted(file.name for file in single.glob("samples/*")) == ["update_000000.csv", "update_000002.csv"]


@torch.no_grad()
def plain_samples(setting, world, policy_folder: Path, update: int = -1, temperature: float = 0.7, split="validation"):
    """A sample to each of the first posts, token by token without padding, cache or batch, and what it is worth: .query
    (text), .tokens, .text, .scores (of the two members), .gold, .kl (k2)."""
    tokenizer = reward.load_tokenizer(str(policy_folder))
    pad_id = tokenizer.pad_token_id
    policy, reference = (AutoModelForCausalLM.from_pretrained(x).eval() for x in (policy_folder, setting.sft))
    backbones = [AutoModel.from_pretrained(x).eval() for x in (*setting.members, setting.gold)]
    heads = [head_of(x) for x in (*setting.members, setting.gold)]
    allowed, found = torch.tensor([i for i in range(len(tokenizer)) if i != pad_id]), []
    for i, row in enumerate(load_from_disk(str(world.dataset))[split].select(range(ROWS))):
        query = [token for token in row["query_token"] if token != pad_id]
        key = ppo.noise_keys(SEED, update, [i], LENGTH)[0]
        tokens = sample_by_hand(policy, query, tokenizer, key, LENGTH, temperature + 1e-7)
        both = torch.tensor([query + tokens])
        before = slice(len(query) - 1, len(query) + len(tokens) - 1)
        logs = []
        for model in (policy, reference):
            logits = (model(both).logits[0, before].double() / (0.7 + 1e-7))[:, allowed]  # as in training
            logs.append(logits.log_softmax(1).gather(1, torch.searchsorted(allowed, torch.tensor(tokens))[:, None]))
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        scores = [
            (model(both).last_hidden_state[0, -1] @ weight[0]).item() + constant
            for model, (weight, constant) in zip(backbones, heads, strict=True)
        ]
        kl = sum(0.5 * x**2 for x in (logs[0] - logs[1]).flatten().tolist())
        found.append(SimpleNamespace(query=row["query"], tokens=tokens, text=text, scores=scores[:2], kl=kl))
        found[-1].gold = scores[2]
        found[-1].has_eos = tokens[-1] == tokenizer.eos_token_id
    return found


def worth(sample) -> float:
    """mean - lambda x variance of two scores."""
    return sum(sample.scores) / 2 - LAMBDA * ((sample.scores[0] - sample.scores[1]) / 2) ** 2


@pytest.mark.parametrize("members", [1, 2])
def test_gold_of_each_update_is_that_of_plain_code(setting, world, single, golden, members):
    """With a reward model as gold and a function as the second, and with a function. At update 0 the policy is the SFT
    model."""
    folder = single if members == 1 else golden
    named, second = (str(setting.gold), setting.function) if members == 1 else (setting.function, None)
    gold.main(gold.Args(runs=(str(folder), f"{folder}/../{folder.name}"), gold=named, second_gold=second))  # 2 names
    table = pandas.read_csv(folder / "gold.csv").set_index("update")
    rows = pandas.read_csv(folder / "gold_samples.csv", keep_default_na=False)
    assert table.index.tolist() == [0, 2] + [3] * (members == 2) and set(table.pop("judge")) == {named}
    for update, policy in ((table.index[0], setting.sft), (table.index[-1], folder / "model")):
        samples = plain_samples(setting, world, policy, temperature=0.7 if members == 1 else 1.1)
        assert len({len(x.tokens) for x in samples}) > 1  # of several lengths
        for x in samples:
            x.second_gold = len(x.query) / 100 - len(x.text) / 7  # FUNCTION
            x.gold = x.gold if members == 1 else x.second_gold
            x.score = x.scores[0] if members == 1 else worth(x)
        columns = {"id": load_from_disk(str(world.dataset))["validation"][:ROWS]["id"]}
        columns |= {"query": [x.query for x in samples], "response": [x.text for x in samples]}
        columns["response_token"] = [str(x.tokens) for x in samples]
        columns |= {"has_eos": [x.has_eos for x in samples], "tokens": [len(x.tokens) for x in samples]}
        columns |= {"kl_k2": [x.kl for x in samples], "score": [x.score for x in samples]}
        columns |= {f"score_{i + 1}": [x.scores[i] for x in samples] for i in range(members)}
        columns |= {"update": update, "gold": [x.gold for x in samples]}
        columns |= {"second_gold": [x.second_gold for x in samples]} if members == 1 else {}
        found = rows[rows["update"] == update].reset_index(drop=True)
        pandas.testing.assert_frame_equal(found, pandas.DataFrame(columns), rtol=1e-3, atol=1e-5, check_dtype=False)
        means = ["gold", "score", "kl_k2", "tokens", *(["second_gold"] if members == 1 else [])]
        expected = {key: statistics.fmean(columns[key]) for key in means}
        expected |= {"gold_se": statistics.stdev(columns["gold"]) / math.sqrt(ROWS)}
        expected |= {"sqrt_kl": math.sqrt(expected["kl_k2"])}
        assert (expected["kl_k2"] > 0.01) == (update > 0)
        assert table.loc[update].to_dict() == pytest.approx(expected, rel=2e-4, abs=1e-7)
        if update:
            last = read_metrics(folder)[-1]
            penalised = [x.score if x.has_eos or members == 2 else -1.0 for x in samples]  # golden has no penalty
            assert last["eval/score"] == pytest.approx(statistics.fmean(penalised), rel=1e-4)
            assert last["eval/score_without_penalty"] == pytest.approx(expected["score"], rel=1e-4)


def test_a_run_without_sampled_tokens_changes_no_other_run(world, capsys):
    """Letter by letter, the sampled tokens are not those that the tokenizer makes of the text."""
    tokenizer = reward.load_tokenizer(str(world.tokenizer))
    letters = [tokenizer(x, add_special_tokens=False).input_ids[-1] for x in " sister"]
    text, query = tokenizer.decode(letters), tokenizer("q", add_special_tokens=False).input_ids
    other = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    samples = {"run": ["new", "old"], "query": ["q"] * 2, "response": [text] * 2, "has_eos": [True] * 2}
    ids = [str([*letters, tokenizer.eos_token_id]), float("nan")]
    found = gold.tokens_of(tokenizer, pandas.DataFrame(samples | {"response_token": ids}))
    assert found == [(*query, *letters, tokenizer.eos_token_id), (*query, *other)] and found[0] != found[1]
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["old"]


# ---- members -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def standard(setting) -> SimpleNamespace:
    """A run of two updates with the defaults, the members' scale from the first five posts: .args, .folder."""
    args = setting.args("standard", standardise_members=True, standardise_posts=ROWS, value_start="sft")
    args = replace(args, total_episodes=2 * BATCH)
    return SimpleNamespace(args=args, folder=run(args))


def test_members_are_standardised_by_their_scores_of_the_sft_policys_samples(setting, world, standard, golden):
    samples = plain_samples(setting, world, setting.sft, -2, split="train")
    scales = json.loads((standard.folder / "members.json").read_text())
    assert list(scales) == [str(x) for x in setting.members] and not (golden / "members.json").exists()
    columns = list(zip(*(x.scores for x in samples), strict=True))
    for (mean, sd), column in zip((x.values() for x in scales.values()), columns, strict=True):
        assert mean == pytest.approx(statistics.fmean(column), rel=1e-4)
        assert sd == pytest.approx(statistics.pstdev(column), rel=1e-3) and sd > 0.05


def test_a_resumed_run_keeps_the_scale_of_its_members(standard, monkeypatch):
    """It continues from the first update's checkpoint, after it was stopped in the second update."""
    args = replace(standard.args, output_dir=f"{standard.folder}_stopped", save_every=1)

    def write_and_end(accelerator, args, metrics, update, last, write=ppo.write_metrics):
        write(accelerator, args, metrics, update, last)
        if update == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ppo, "write_metrics", write_and_end)
        run(args)
    assert not Path(args.output_dir, "model").exists()
    monkeypatch.setattr(ppo, "member_scales", lambda *_: ppo.fail("measured again"))
    resumed = run(replace(args, resume=True))
    assert weights(resumed) == weights(standard.folder)
    assert without(read_metrics(resumed), "time/") == without(read_metrics(standard.folder), "time/")


def test_a_member_that_says_one_thing_of_all_is_named(setting, tmp_path):
    folder = make_constant(setting.members[1], tmp_path / "constant")
    paths = [str(setting.members[0]), str(folder)]
    text = error(setting.args("", output_dir=str(tmp_path / "run"), reward_model_paths=paths, standardise_members=True))
    assert f"{folder} scores all samples 0.2: it cannot be standardised" in text
    assert not (tmp_path / "run").exists()


def error(args) -> str:
    """The message that the run ends with."""
    with pytest.raises(SystemExit) as end:
        ppo.main(replace(args))
    text = str(end.value)
    assert text.startswith("error: ") and "\n" not in text
    return text


def test_a_member_that_gives_no_number_in_the_rollout_is_named(setting, monkeypatch):
    """An infinity does not show in the worst case, the minimum."""
    original, calls = ppo.reward_scores, []

    def reward_scores(accelerator, reward_model, batch, args):
        found = original(accelerator, reward_model, batch, args)
        calls.append(reward_model)
        return found.fill_(math.inf) if len(calls) == 2 else found  # of the second member, in the first update

    monkeypatch.setattr(ppo, "reward_scores", reward_scores)
    text = error(setting.args("bad_rollout", reward_combination="wco", uwo_lambda=None))
    assert text == f"error: a score of {setting.members[1]} is not finite; check that model"
    assert read_metrics(setting.root / "bad_rollout") == []


# ---- commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["", "ensembles", "llama2", "variants"])
def test_the_commands_of_docstrings_parse(folder):
    """An unknown flag or a value of a wrong type exits. Every script has a command, but llama2/reward.py."""
    given, paths = [], [path for path in sorted((ROOT / folder).glob("*.py")) if "class Args" in path.read_text()]
    for path in paths:
        text = ast.get_docstring(ast.parse(path.read_text())).replace("\\\n", " ")
        for name, words in re.findall(r"^.*\bpython ((?:\w+/)?\w+\.py) (.*)$", text, re.M):
            words = [word for word in shlex.split(words, comments=True) if word != "..."]
            tyro.cli(script(name).Args, args=words)
            given.append(name)
    assert paths and {str(path.relative_to(ROOT)) for path in paths} - set(given) <= {"llama2/reward.py"}


def test_the_commands_are_the_papers_tables():
    """The numbers of the paper in what ensembles/run.sh runs, and that its steps are of each other's folders."""
    command = ["bash", str(ROOT / "ensembles" / "run.sh"), "--dry-run"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = defaultdict(list)
    for words in map(shlex.split, lines):
        name = next(word for word in words if word.endswith(".py"))
        found[Path(name).stem if name != "ensembles/ppo.py" else "run"].append(
            tyro.cli(script(name).Args, args=words[words.index(name) + 1 :])
        )
    members, runs, [labels], [bon] = found["reward"], found["run"], found["gold_label"], found["best_of_n"]
    paths, [average] = [x.output_dir for x in members], found["average"]
    assert bon.reward_model_paths == average.reward_model_paths == paths
    assert [x.seed for x in members] == [1, 2, 3, 4, 5]
    assert {x.preference_dataset for x in members} == {f"{labels.output_dir}/noise_25"}
    expected = {
        "alpaca_dataset": {"max_query_length": 520, "max_response_length": 256},
        "sft": {"learning_rate": 8e-6, "num_train_epochs": 3, "batch_size": 4, "loss_on": "response"},
        "gold_label": {"temperature": (1.0,), "top_p": 0.9, "response_length": 256, "label_noise": (0.0, 0.25, 0.35)},
        "best_of_n": {"temperature": 1.0, "top_p": 0.9, "response_length": 256, "prompts": 1000, "samples": 12_500},
        "reward": {"model": "EleutherAI/pythia-70m", "learning_rate": 1e-5, "num_train_epochs": 5, "batch_size": 32}
        | {"max_grad_norm": 2, "score_l2": 0.001},
        "run": {"learning_rate": 1e-6, "lr_schedule": "cosine", "final_learning_rate": 1e-7, "num_ppo_epochs": 4}
        | {"lr_schedule_length": 10 / 3, "vf_coef": 1, "eval_temperature": 0.7}
        | {"batch_size": 256, "num_mini_batches": 8, "cliprange": 0.2, "cliprange_value": 0.2, "lam": 0.95}
        | {"temperature": 1.0, "response_length": 256, "penalty_reward_value": None, "value_start": "sft"}
        | {"model": "EleutherAI/pythia-1.4b", "standardise_members": True},
        "gold": {"gold": labels.gold, "runs": (str(Path(found["run"][0].output_dir).parents[1]),)},
    }
    for name, settings in expected.items():
        assert found[name] and all(settings.items() <= vars(x).items() for x in found[name]), name
    for x in runs:
        assert 0 <= x.total_episodes // 256 * 4 * 8 - 3000 < 32  # the paper's steps, in whole updates
    how = [("mean", None, paths), ("wco", None, paths), ("uwo", 0.1, paths)]
    how += [("mean", None, [x]) for x in (average.output_dir, *paths)]
    ways = [(x.kl_coef, x.reward_combination, x.uwo_lambda, x.reward_model_paths) for x in runs]
    assert ways == [(kl, *way) for kl in (0, 0.01, 0.1, 0.2) for way in how]
    assert len({x.output_dir for x in runs}) == len(runs) == 36


# notes each command, and makes the folder that the real one would, but neither a base nor a reward model
STAND_IN = """#!/usr/bin/env bash
echo "$*" >>"$LOG"
mkdir -p "${@: -1}"
[[ $1 != ensembles/alpaca_dataset.py ]] || mkdir -p "${@: -1}/sft"
[[ $1 != llama2/reward.py ]] || { mkdir -p "${@: -1}/eval" && touch "${@: -1}/eval/accuracy.csv" && exit 9; }
[[ $1 != sft.py ]] || mkdir -p "${@: -1}/model"
"""


def test_what_is_kept_is_finished_and_of_the_same_settings(tmp_path):
    """A policy that has the turns gets no base, a reward model that was measured and not saved is made again, and the
    runs of one gold reward are not taken for those of another."""
    (tmp_path / "ensembles").mkdir()
    shutil.copy(ROOT / "ensembles/run.sh", tmp_path / "ensembles")
    write_program(tmp_path / "python", STAND_IN)
    log = tmp_path / "log"

    def start(**settings: str) -> list[list[str]]:
        log.write_text("")
        path = f"{tmp_path}:{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "LOG": str(log), "LAUNCH": "python"} | settings
        done = subprocess.run(["bash", str(tmp_path / "ensembles/run.sh")], env=environment, capture_output=True)
        assert done.returncode != 0
        return [shlex.split(line) for line in log.read_text().splitlines()]

    commands = start()
    assert [x[2] for x in commands if x[0] == "sft.py"] == ["EleutherAI/pythia-1.4b", "EleutherAI/pythia-70m"]
    assert commands[-1][0] == "llama2/reward.py" and start() == commands[-1:]
    assert start(GOLD="another") == start(POLICY="another") == [] and start(NOISE="35") != []
    assert len(start(GOLD="another", RUNS="runs/more")) == len([x for x in commands if "alpaca" not in x[0]])


def test_real_instructions_at_any_path(tmp_path):
    """The rows lie where the script is called, and their name has a quotation mark. The gold reward reads them."""
    for name in ("ensembles", "quickstart", "elsewhere"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / "ensembles/real_instructions.sh", tmp_path / "ensembles")
    (tmp_path / "quickstart/setup.sh").touch()
    rows = [
        {"instruction": "Say", "input": "a b", "output": "a b"},
        {"instruction": "Go", "input": "", "output": "c d"},
    ]
    write_jsonl(tmp_path / 'elsewhere/it"s.jsonl', rows)
    text = f'python() {{ exit 9; }}; export -f python; bash "{tmp_path}/ensembles/real_instructions.sh" \'it"s.jsonl\''
    assert subprocess.run(["bash", "-c", text], cwd=tmp_path / "elsewhere", capture_output=True).returncode == 9
    function = load_function("--gold", f"{tmp_path}/data/real_instructions/gold.py:score")
    prompts = [f"<|prompter|>{prompt}<|endoftext|><|assistant|>" for prompt in ("Say\na b", "Go")]
    assert [function(prompt, "a b") for prompt in prompts] == [1.0, 0.0]
