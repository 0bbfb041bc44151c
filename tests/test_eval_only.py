"""--eval-only: what --run-eval wrote at the end of a run comes out of its checkpoint again, byte for byte, and nothing
else of a run is touched."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import free_port
from transformers import AutoModelForCausalLM

import dpo
import ppo
import reward
import sft

ROOT = Path(__file__).resolve().parents[1]
STAGES = {"sft": sft, "dpo": dpo, "ppo": ppo}
TABLES = {
    "sft": ["rouge.csv", "samples_test.csv", "samples_validation.csv"],
    "dpo": ["accuracy.csv", "pairs_validation.csv", "pairs_validation_cnndm.csv", "rouge.csv", "samples_test.csv"]
    + ["samples_validation.csv"],
    "ppo": ["rouge.csv", "samples_validation.csv"],
}


def run(stage: str, **arguments):
    AcceleratorState._reset_state(True)  # accelerate keeps one state a process
    module = STAGES.get(stage, reward)
    module.main(module.Args(**arguments))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def without_eval(found: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in found.items() if not name.startswith("eval/")}


def last_validation_loss(folder: Path) -> str:
    """As --eval-only prints it: what the run of this folder measured after its last update."""
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return f"validation loss of {folder}/model: {last['eval/loss']:.4f}\n"


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory) -> SimpleNamespace:
    """.root, .flags[stage], with which each of the three ran with --run-eval, and .run[stage], their run folders. The
    steps are large, so that every stage's end is far from its start; sampling is warm, so that noise matters."""
    root = tmp_path_factory.mktemp("eval_only")
    common = {"model": "nano", "seed": 5, "batch_size": 8, "total_episodes": 16, "learning_rate": 3e-3}
    common |= {"dataset": str(world.dataset), "run_eval": True}
    sampling = {"response_length": 8, "eval_temperature": 0.7, "forward_batch_size": 6}
    pairs = {"preference_dataset": str(world.preference_dataset), "sft_model_path": str(root / "sft")}
    flags = {
        "sft": common | sampling | {"model": str(world.model)},
        "reward": common | pairs,
        "dpo": common | pairs | sampling,
        "ppo": common | sampling | {"reward_model_paths": [str(root / "reward")]},
    }
    for stage in flags:
        start = {"sft_model_path": str(root / "sft")} if stage == "ppo" else {}  # which its evaluation does without
        run(stage, **flags[stage], **start, output_dir=str(root / stage))
    return SimpleNamespace(root=root, flags=flags, run={stage: root / stage for stage in STAGES})


@pytest.fixture
def nothing_trains(monkeypatch):
    """An optimiser, a log or a saved model is an error."""
    for module in STAGES.values():
        for name in ("prepare", "MetricsLog", "save_model", "save_checkpoint"):
            monkeypatch.setattr(module, name, lambda *args, name=name: pytest.fail(f"{name} was called"))
    monkeypatch.setattr(torch.optim, "AdamW", lambda *args, **kwargs: pytest.fail("an optimizer was made"))


@pytest.mark.parametrize("stage", STAGES)
def test_a_finished_run_gives_its_tables_again(trained, nothing_trains, tmp_path, monkeypatch, capsys, stage):
    """Into a new folder and, after its tables were spoilt, into its own, where nothing else changes. Fewer episodes
    than a batch are no error, since nothing is trained."""
    monkeypatch.chdir(tmp_path)
    before = files(trained.run[stage])
    assert [name.removeprefix("eval/") for name in before if name.startswith("eval/")] == TABLES[stage]
    flags = trained.flags[stage] | {"run_eval": False, "eval_only": str(trained.run[stage]), "total_episodes": 1}
    run(stage, **flags, output_dir="new")
    found = files(tmp_path / "new")
    assert found.pop("args.json") and found == {f"eval/{name}": before[f"eval/{name}"] for name in TABLES[stage]}
    args = json.loads(Path("new/args.json").read_text())
    assert (args["stage"], args["eval_only"]) == (stage, str(trained.run[stage])) and args["run_eval"]
    if stage == "ppo":
        assert args["sft_model_path"] is None
    said = capsys.readouterr().out
    assert "rougeL" in said
    if stage == "sft":
        assert last_validation_loss(trained.run[stage]) in said

    for name in TABLES[stage]:
        (trained.run[stage] / "eval" / name).write_text("spoilt")
    run(stage, **flags)  # the folder of the run by default
    assert files(trained.run[stage]) == before
    for name in TABLES[stage]:
        (trained.run[stage] / "eval" / name).write_text("spoilt")
    run(stage, **flags, output_dir=os.path.relpath(trained.run[stage]))  # by another name
    assert files(trained.run[stage]) == before
    assert {path.name for path in tmp_path.iterdir()} == {"new"} | ({"reference_logprobs"} if stage == "dpo" else set())


def test_a_run_whose_args_do_not_tell_its_stage(trained, tmp_path):
    """As those of earlier versions of the scripts: it gets its tables anew as any other."""
    folder = tmp_path / "old"
    shutil.copytree(trained.run["sft"], folder)
    args = json.loads((folder / "args.json").read_text())
    (folder / "args.json").write_text(json.dumps({key: args[key] for key in args if key != "stage"}))
    before = files(folder)
    for name in TABLES["sft"]:
        (folder / "eval" / name).unlink()
    run("sft", **trained.flags["sft"], eval_only=str(folder))
    assert files(folder) == before


@pytest.mark.parametrize("stage", STAGES)
def test_another_checkpoint_gives_other_tables(trained, tmp_path, stage):
    """The run's, one with a little noise on the weights of its head, and the model that the run began from: no table of
    rows is that of another."""
    changed = tmp_path / "changed"
    shutil.copytree(trained.run[stage] / "model", changed)
    model = AutoModelForCausalLM.from_pretrained(changed)
    torch.manual_seed(1)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head.add_(torch.randn_like(head), alpha=0.1 * head.std().item())
    model.save_pretrained(changed)
    start = trained.flags["sft"]["model"] if stage == "sft" else trained.run["sft"] / "model"
    found = [files(trained.run[stage] / "eval")]
    for checkpoint in (changed, start):
        new = tmp_path / f"new_{len(found)}"
        run(stage, **trained.flags[stage], eval_only=str(checkpoint), output_dir=str(new))
        found.append(files(new / "eval"))
    for table in TABLES[stage]:
        if table.startswith(("samples_", "pairs_")):  # not means, which may agree
            assert len({tables[table] for tables in found}) == 3, table


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_that_is_no_run_gets_a_folder_of_its_name(trained, tmp_path, monkeypatch, stage):
    """From the Hub, here pretended, and from a folder: runs/{stage}/{name}/{seed}. There it is evaluated once."""
    monkeypatch.chdir(tmp_path)
    asked, module = [], STAGES[stage]
    shutil.copytree(trained.run[stage] / "model", "somewhere/my-policy")

    def download(repo_id, revision, **_):
        asked.append((repo_id, revision))
        return "somewhere/my-policy"

    monkeypatch.setattr(module, "snapshot_download", download)
    for path, name in (("me/released@branch_7", "released"), ("somewhere/my-policy/", "my-policy")):
        run(stage, **trained.flags[stage], eval_only=path)
        folder = tmp_path / "runs" / stage / name / "5"
        assert files(folder / "eval") == files(trained.run[stage] / "eval")
        assert {path.name for path in folder.iterdir()} == {"args.json", "eval"}
        assert json.loads((folder / "args.json").read_text())["eval_only"] == path
        with pytest.raises(SystemExit, match="^error: .* already holds a run: .*--output-dir"):
            run(stage, **trained.flags[stage], eval_only=path)
    assert set(asked) == {("me/released", "branch_7")}


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_gives_the_same_tables(trained, tmp_path, capsys, stage):
    """Training wraps the model in autocast, --eval-only does not: the passes have to be the same all the same."""
    start = {"sft_model_path": str(trained.root / "sft")} if stage == "ppo" else {}
    flags = trained.flags[stage] | {"mixed_precision": "bf16"}
    run(stage, **flags, **start, output_dir=str(tmp_path / "run"))
    run(stage, **flags, eval_only=str(tmp_path / "run"), output_dir=str(tmp_path / "new"))
    assert files(tmp_path / "new" / "eval") == files(tmp_path / "run" / "eval")
    assert files(tmp_path / "new" / "eval") != files(trained.run[stage] / "eval")
    if stage == "sft":
        assert last_validation_loss(tmp_path / "run") in capsys.readouterr().out


# ---- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_bad_input(trained, tmp_path, monkeypatch, stage):
    """One message each, before anything is written or asked of the Hub."""
    monkeypatch.chdir(tmp_path)
    own, other = str(trained.run[stage]), str(trained.run["ppo" if stage == "sft" else "sft"])
    before = files(trained.root)
    trains_nothing = "error: --eval-only trains nothing: it goes without --resume, --push-to-hub and --track"
    shutil.copytree(trained.run[stage] / "model", "torn", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"torn")
    cases = [
        ({"eval_only": own, "resume": True}, trains_nothing),
        ({"eval_only": own, "push_to_hub": True, "hub_id": "me/it"}, trains_nothing),
        ({"eval_only": own, "track": True}, trains_nothing),
        ({"eval_only": ""}, "error: --eval-only is empty: "),
        ({"eval_only": str(tmp_path / "nowhere")}, f"error: --eval-only {tmp_path}/nowhere: no checkpoint there"),
        ({"eval_only": "nobody/nothing@main"}, "error: --eval-only nobody/nothing@main: no checkpoint folder and not"),
        ({"eval_only": "torn"}, "error: the model in torn cannot be read"),
        ({"eval_only": own, "output_dir": other}, f"error: {other} already holds a run: "),
        ({"eval_only": other}, f"error: {other} already holds a run: "),  # another stage's: its tables stay
        ({"eval_only": f"{own}/model", "output_dir": own}, f"error: {own} already holds a run: "),
    ]
    for changes, message in cases:
        with pytest.raises(SystemExit) as error:
            run(stage, **trained.flags[stage] | changes)
        assert str(error.value).startswith(message) and "\n" not in str(error.value), error.value
        assert files(trained.root) == before and {path.name for path in tmp_path.iterdir()} == {"torn"}


def test_dpo_wants_the_tokenizer_of_its_reference(trained, tmp_path):
    shutil.copytree(trained.run["dpo"] / "model", tmp_path / "other")
    tokenizer = sft.load_tokenizer(str(tmp_path / "other"))
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(
        SystemExit, match=r"^error: --eval-only .*/other: a model of another tokenizer than .*/sft/model$"
    ):
        run("dpo", **trained.flags["dpo"], eval_only=str(tmp_path / "other"), output_dir=str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


# ---- several processes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "precision"), [("cpu", "no"), ("zero3", "bf16")])
def test_two_processes(trained, tmp_path, config, precision):
    """Plain, and under DeepSpeed, where training shards the model and has its weights in bfloat16: runs and their
    evaluations, in one launch."""
    jobs = []
    for stage in STAGES:
        start = {"sft_model_path": str(trained.root / "sft")} if stage == "ppo" else {}
        flags = trained.flags[stage] | {"mixed_precision": precision}
        jobs.append((stage, flags | start | {"output_dir": str(tmp_path / stage)}))
        jobs.append((stage, flags | {"eval_only": str(tmp_path / stage), "output_dir": str(tmp_path / f"{stage}_new")}))
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", 2, "--mixed_precision", precision]
    command += ["--config_file", ROOT / "benchmark" / "accelerate" / f"{config}.yaml"]
    command += ["--main_process_port", free_port(), __file__, tmp_path / "jobs.json"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("2 process(es)") == len(STAGES)
    for stage in STAGES:
        assert done.stdout.count(f"evaluated {tmp_path / stage / 'model'}") == 1
        found = files(tmp_path / f"{stage}_new" / "eval")
        assert found == files(tmp_path / stage / "eval") and list(found) == TABLES[stage]


if __name__ == "__main__":  # one of the two processes: the runs of a list, one after another
    import deepspeed  # noqa: F401

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # spares two minutes of compiling; gloo does it
    destroy, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, lambda group=None: None
    for name, arguments in json.loads(Path(sys.argv[1]).read_text()):
        run(name, **arguments)
    destroy()
