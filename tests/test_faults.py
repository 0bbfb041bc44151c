"""What comes from outside (signals, full disks, torn files, dead ranks, missing services, code in place of data) ends a
run with one message or not at all, and never costs what was saved."""

import gzip
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import kill_runs
import pandas
import pytest
import torch
from conftest import free_port
from datasets import DatasetDict, load_from_disk
from kill_runs import STAGES, finish, left_behind, read_phases, start
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> SimpleNamespace:
    """.args[stage] of six updates with checkpoints, all trackers and evaluation, .root, and .whole[stage]: what the run
    left that nothing disturbed (made when first asked for)."""
    root = tmp_path_factory.mktemp("faults")
    args, whole = kill_runs.settings(root), {}

    class Whole:
        def __getitem__(self, stage):
            if stage not in whole:
                folder = root / f"{stage}.whole"
                assert finish(start(stage, replace(args[stage], output_dir=str(folder)))) == 0
                whole[stage] = left_behind(folder)
            return whole[stage]

    return SimpleNamespace(root=root, args=args, whole=Whole())


def own(runs, stage: str, name: str, **changes):
    """Arguments of a run in a folder of its own."""
    return replace(runs.args[stage], output_dir=str(runs.root / f"{stage}.{name}"), **changes)


def said(args) -> str:
    """What the runs in a folder printed so far."""
    return Path(f"{args.output_dir}.log").read_text()


def ends_as(runs, stage: str, args):
    """Resume a run: it ends as the one that nothing disturbed did."""
    assert finish(start(stage, replace(args, resume=True))) == 0, said(args)[-2000:]
    found, expected = left_behind(Path(args.output_dir)), runs.whole[stage]
    assert [key for key in expected if found[key] != expected[key]] == []


def wait_until(condition, what):
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until, f"{what} did not come"
        time.sleep(0.001)


def wait_for(log: Path, event: tuple[str, str], count: int = 1):
    """Until a run has written an event `count` times into its log of phases."""
    wait_until(lambda: sum((word, name) == event for word, _, name in read_phases(log)) >= count, event)


# ---- kill -9 at random, in short; tests/kill_runs.py is the long form -------------------------------------------


def test_the_undisturbed_runs_are_complete(runs):
    for stage in STAGES:
        assert kill_runs.complete(runs.whole[stage]) == "", stage
        assert [line["update"] for line in runs.whole[stage]["metrics"]][-6:] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_random_and_resumed_ends_the_same(runs, tmp_path, stage):
    rows = kill_runs.kill_stage(stage, runs.args[stage], tmp_path, kill_runs.Args(kills=2, seed=3))
    assert [row["different"] for row in rows] == ["nothing", "nothing"], rows


def test_an_update_that_is_missing_or_there_twice_is_noticed(runs):
    found = dict(runs.whole["sft"])
    assert kill_runs.complete(found | {"TensorBoard": found["TensorBoard"][1:]})
    assert kill_runs.complete(found | {"TensorBoard": sorted(found["TensorBoard"] + found["TensorBoard"][:1])})
    assert kill_runs.complete(found | {"W&B": []}) and kill_runs.complete(found | {"W&B": found["W&B"] * 2})
    [history] = found["W&B"]
    assert kill_runs.complete(found | {"W&B": [{step: row for step, row in history.items() if step != 3}]})


# ---- signals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_signal_saves_after_the_update_and_ends_with_75(runs, stage):
    number = {"sft": signal.SIGUSR1, "ppo": signal.SIGUSR1}.get(stage, signal.SIGTERM)
    args, log = own(runs, stage, "signal", save_every=0), runs.root / f"{stage}.signal.phases"
    child = start(stage, args, log)
    wait_for(log, ("leave", "optimizer_step"), 1 if stage != "ppo" else 5)  # PPO: four in the first update
    os.kill(child, number)
    assert finish(child) == 75
    [checkpoint] = (Path(args.output_dir) / "checkpoints").iterdir()
    update = int(checkpoint.name.removeprefix("update_"))
    assert 1 <= update < 6 and not (Path(args.output_dir) / "model").exists()
    lines = (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["update"] == update
    assert f"stopped by a signal after update {update}" in said(args)
    ends_as(runs, stage, args)


def test_after_the_last_update_a_signal_ends_the_run_at_once(runs):
    args, log = own(runs, "sft", "late_signal"), runs.root / "late_signal.phases"
    child = start("sft", args, log)
    wait_for(log, ("enter", "save_model"))
    os.kill(child, signal.SIGTERM)
    assert finish(child) == -signal.SIGTERM
    ends_as(runs, "sft", args)


# ---- checkpoints that are not what was written ------------------------------------------------------------------


def cut_short(path: Path):
    os.truncate(path, path.stat().st_size - 1)


DAMAGES = {  # what happens to the newest of the two checkpoints, what is said about it
    "optimiser cut short": (lambda x: cut_short(x / "optimizer.bin"), "optimizer.bin has "),
    "weights missing": (lambda x: (x / "model.safetensors").unlink(), "model.safetensors has 0 bytes of "),
    "metrics missing": (lambda x: (x / "metrics.jsonl").unlink(), "metrics.jsonl has 0 bytes of "),
    "list cut short": (lambda x: cut_short(x / "complete.json"), ""),  # its last line break: still whole
    "list torn": (lambda x: os.truncate(x / "complete.json", 30), "complete.json is missing or torn"),
    "empty folder": (lambda x: [file.unlink() for file in x.iterdir()], "complete.json is missing or torn"),
}


@pytest.fixture(scope="module")
def stopped(runs) -> Path:
    """An SFT run that was killed in the evaluation, with the checkpoints 4 and 6."""
    args, log = own(runs, "sft", "stopped"), runs.root / "stopped.phases"
    child = start("sft", args, log)
    wait_for(log, ("enter", "sample_split"))
    os.kill(child, signal.SIGKILL)
    finish(child)
    assert [x.name for x in sorted(Path(args.output_dir, "checkpoints").iterdir())] == [
        "update_000004",
        "update_000006",
    ]
    return Path(args.output_dir)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_torn_checkpoint_is_skipped_and_replaced(runs, stopped, damage):
    args = own(runs, "sft", damage.replace(" ", "_"))
    shutil.copytree(stopped, args.output_dir)
    newest = Path(args.output_dir) / "checkpoints" / "update_000006"
    do, message = DAMAGES[damage]
    do(newest)
    ends_as(runs, "sft", args)
    assert (f"skipping {newest}: {message}" in said(args)) == bool(message)
    assert f"continuing from {newest if not message else newest.with_name('update_000004')}" in said(args)
    assert STAGES["sft"].checkpoint_damage(newest) == ""  # written anew


def test_without_a_complete_checkpoint_the_run_begins_anew(runs, stopped):
    args = own(runs, "sft", "none_complete")
    shutil.copytree(stopped, args.output_dir)
    for checkpoint in Path(args.output_dir, "checkpoints").iterdir():
        cut_short(checkpoint / "model.safetensors")
    ends_as(runs, "sft", args)
    assert "no complete checkpoint" in said(args) and said(args).count("skipping") == 2


def test_a_checkpoint_that_cannot_be_read_is_named(runs, stopped):
    args = own(runs, "sft", "unreadable")
    shutil.copytree(stopped, args.output_dir)
    file = Path(args.output_dir) / "checkpoints" / "update_000006" / "optimizer.bin"
    file.write_bytes(b"\0" * file.stat().st_size)
    assert finish(start("sft", replace(args, resume=True))) == 1
    assert f"error: --resume: {file.parent} (delete it to continue from the one before) cannot be read" in said(args)
    shutil.rmtree(file.parent)
    ends_as(runs, "sft", args)


def test_a_checkpoint_of_deepspeed_is_for_the_same_launch_only(runs, stopped):
    args = own(runs, "sft", "deepspeed")
    shutil.copytree(stopped, args.output_dir)
    file = Path(args.output_dir) / "checkpoints" / "update_000006" / "complete.json"
    content = json.loads(file.read_text()) | {"kind": "DeepSpeed ZeRO-2, 8 process(es)"}
    file.write_text(json.dumps(content))
    assert finish(start("sft", replace(args, resume=True))) == 1
    assert "was written by DeepSpeed ZeRO-2, 8 process(es); plain or DDP cannot read it" in said(args)


@pytest.mark.parametrize(("keep", "kept"), [(0, 1), (1, 1), (3, 3)])
def test_the_newest_checkpoints_are_kept(runs, keep, kept):
    args = own(runs, "sft", f"keep_{keep}", save_every=1, keep_checkpoints=keep, run_eval=False, track=False)
    assert finish(start("sft", args)) == 0
    found = sorted(x.name for x in Path(args.output_dir, "checkpoints").iterdir())
    assert found == ["update_000004", "update_000005", "update_000006"][-kept:]


# ---- full disk --------------------------------------------------------------------------------------------------


def start_limited(stage: str, args, size: int) -> int:
    """The run in a child process none of whose files may grow beyond `size` bytes: writes fail as on a full disk."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        os._exit(finish(start(stage, args)))
    return child


@pytest.mark.parametrize(
    ("stage", "save_every", "what"), [("sft", 2, "checkpoints/update_000002"), ("ppo", 0, "model")]
)
def test_a_full_disk_while_saving(runs, stage, save_every, what):
    args = own(runs, stage, f"full_{save_every}", save_every=save_every, track=False)
    assert finish(start_limited(stage, args, 300_000)) == 1  # the weights have 700,000
    folder = Path(args.output_dir)
    assert f"error: {folder / what} could not be written" in said(args) and "--resume" in said(args)
    assert "Traceback" not in said(args)
    assert not list(folder.rglob("*.tmp")) and not (folder / what).exists()
    args = replace(args, save_every=2, track=True)
    ends_as(runs, stage, args)


# ---- damaged data and models ------------------------------------------------------------------------------------


def refuse(args, stage: str) -> str:
    """The message that a stage ends with before it has made a run folder."""
    assert finish(start(stage, args)) == 1, said(args)[-2000:]
    message = said(args)
    assert "error: " in message and "Traceback" not in message and not Path(args.output_dir).exists()
    return message[message.index("error: ") :]


def test_a_damaged_data_file(runs):
    source = Path(runs.args["sft"].dataset)
    [file] = (source / "train").glob("*.arrow")
    data = file.read_bytes()
    damages = {"half": data[: len(data) // 2], "short": data[:-100], "zeros": b"\0" * len(data), "empty": b""}
    for name, content in damages.items():
        folder = runs.root / f"data_{name}"
        shutil.copytree(source, folder)
        (folder / "train" / file.name).write_bytes(content)
        message = refuse(own(runs, "sft", f"data_{name}", dataset=str(folder)), "sft")
        assert f"--dataset {folder}" in message, name


@pytest.mark.parametrize("wrong", [-7, 100_000])
def test_ids_that_no_tokenizer_has(runs, wrong):
    folder = runs.root / f"ids_{wrong}"
    data = load_from_disk(runs.args["sft"].dataset)
    rows = data["train"].to_list()
    rows[20]["reference_response_token"][3] = wrong
    changed = data["train"].from_list(rows, features=data["train"].features)
    DatasetDict(data | {"train": changed}).save_to_disk(str(folder))
    message = refuse(own(runs, "ppo", f"ids_{wrong}", dataset=str(folder)), "ppo")
    assert f"split train, column reference_response_token: ids {min(wrong, 0)} to" in message


def test_weights_cut_short(runs):
    folder = runs.root / "short_model"
    shutil.copytree(runs.root / "reward" / "model", folder)
    cut_short(folder / "model.safetensors")
    message = refuse(own(runs, "ppo", "short_reward", reward_model_paths=[str(folder)]), "ppo")
    assert f"the reward model in {folder} cannot be read" in message
    message = refuse(own(runs, "reward", "short_sft", sft_model_path=str(folder)), "reward")
    assert f"the model in {folder} cannot be read" in message


# ---- losses that are no numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_no_number_stops_before_the_step(runs, stage):
    """A learning rate of 1e30 makes the second update's loss infinite or NaN; the first one's checkpoint is kept."""
    changes = {"num_ppo_epochs": 1} if stage == "ppo" else {}
    args = own(runs, stage, "nan", learning_rate=1e30, save_every=1, track=False, **changes)
    assert finish(start(stage, args)) == 1, said(args)[-2000:]
    message = said(args)[said(args).index("error: ") :]
    assert "update 2, episodes 8 to 15: the gradient norm is " in message and "Traceback" not in said(args)
    checkpoints = Path(args.output_dir) / "checkpoints"
    assert [x.name for x in checkpoints.iterdir()] == ["update_000001"]
    assert all(x.isfinite().all() for x in load_file(checkpoints / "update_000001" / "model.safetensors").values())
    assert len((Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()) == 1 + (stage in ("sft", "dpo"))


# ---- a rank that dies -------------------------------------------------------------------------------------------


def two_ranks(stage: str, args, tmp_path: Path) -> list[subprocess.Popen]:
    """Two processes of one run, started by hand: no launcher that would end the one when the other ends."""
    (tmp_path / "args.json").write_text(json.dumps(vars(args)))
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, __file__, stage, str(tmp_path / "args.json")]
    return [
        subprocess.Popen(
            command,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=(tmp_path / f"rank{rank}.log").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in (0, 1)
    ]


def wait_for_update(folder: Path, update: int):
    path, text = folder / "metrics.jsonl", f'"update": {update},'
    wait_until(lambda: path.exists() and text in path.read_text(), text)


def test_a_dead_rank_ends_the_other_and_a_signal_to_one_stops_both(runs, tmp_path):
    args = own(runs, "ppo", "ranks", save_every=1, track=False, run_eval=False)
    folder = Path(args.output_dir)
    ranks = two_ranks("ppo", args, tmp_path)
    wait_for_update(folder, 2)
    ranks[1].kill()
    assert ranks[0].wait(60) != 0 and ranks[1].wait(60) == -signal.SIGKILL
    assert not (folder / "model").exists()
    ranks = two_ranks("ppo", replace(args, resume=True), tmp_path)
    wait_for_update(folder, 4)
    ranks[1].send_signal(signal.SIGUSR1)
    logs = [(tmp_path / f"rank{rank}.log") for rank in (0, 1)]
    assert [rank.wait(60) for rank in ranks] == [75, 75], logs[0].read_text()[-2000:] + logs[1].read_text()[-2000:]
    assert "stopped by a signal after update" in logs[0].read_text()
    args = replace(args, save_every=2, track=True, run_eval=True)
    assert finish(start("ppo", replace(args, resume=True))) == 0  # one process ends what two began
    for mine, theirs in zip(left_behind(folder)["metrics"], runs.whole["ppo"]["metrics"], strict=True):
        assert mine["episode"] == theirs["episode"]
        assert mine["objective/rlhf_reward"] == pytest.approx(theirs["objective/rlhf_reward"], rel=1e-5, abs=1e-6)


# ---- services that are not there --------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["sft", "dpo", "ppo"])
def test_wandb_gets_a_table_of_samples(runs, stage):
    assert runs.whole[stage]
    folder = runs.root / f"{stage}.whole"
    [file] = folder.glob("wandb/offline-run-*/files/media/table/samples/validation_*.table.json")
    found, expected = json.loads(file.read_text()), pandas.read_csv(folder / "eval" / "samples_validation.csv")
    assert found["columns"] == list(expected.columns) and len(found["data"]) == min(64, len(expected))
    place = found["columns"].index("response")
    assert [row[place] for row in found["data"]] == expected["response"].fillna("").tolist()[:64]


def test_wandb_out_of_reach_costs_nothing(runs, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "a1b2" * 10)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "5")
    args = own(runs, "sft", "no_wandb")
    assert finish(start("sft", args)) == 0, said(args)[-3000:]
    found = left_behind(Path(args.output_dir))
    assert [key for key in found if found[key] != runs.whole["sft"][key]] == []
    assert "W&B is not available" in said(args) and f"wandb sync {args.output_dir}/wandb/offline-run-" in said(args)


class LoopbackWandb:
    """As much of a W&B server as a client needs that logs metrics: .history {run: rows that arrived}, .stop()."""

    def __init__(self):
        server = self
        self.history = {}

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                answer = {}
                if self.path.startswith("/graphql"):
                    answer = {"data": server.data(json.loads(body))}
                elif self.path.endswith("/file_stream"):
                    rows = json.loads(body).get("files", {}).get("wandb-history.jsonl", {"content": []})["content"]
                    server.history.setdefault(self.path.split("/")[-2], []).extend(map(json.loads, rows))
                answer = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def data(self, request: dict) -> dict:
        name = (request.get("variables") or {}).get("name") or ""
        rows = [json.dumps(row) for row in self.history.get(name, [])]
        bucket = {"id": "1", "name": name, "displayName": name, "config": "{}", "summaryMetrics": "{}", "tags": []}
        bucket |= {"historyTail": json.dumps(rows[-1:]), "historyLineCount": len(rows), "wandbConfig": '{"t": 1}'}
        bucket |= {"eventsTail": "[]", "eventsLineCount": 0, "logLineCount": 0}
        bucket["project"] = {"id": "1", "name": "p", "entity": {"id": "1", "name": "me"}}
        viewer = {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
        known = {"bucket": bucket if rows else None}
        files = {"runID": "1", "uploadHeaders": [], "files": []}
        upsert = {"bucket": bucket, "inserted": not rows}
        return {"viewer": viewer, "model": known, "upsertBucket": upsert, "createRunFiles": files}

    def stop(self):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server(monkeypatch):
    found = LoopbackWandb()
    settings = {"MODE": "online", "BASE_URL": found.url, "API_KEY": "a1b2" * 10, "FINISH_TIMEOUT": "5"}
    for name, value in settings.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield found
    found.stop()


def check_history(args, server):
    """Each update of a run is on the server once, in order, with what metrics.jsonl says (its clock included, but of
    updates that were done twice)."""
    run = (Path(args.output_dir) / "wandb_id.txt").read_text()
    lines = [json.loads(line) for line in (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()]
    assert [row["_step"] for row in server.history[run]] == [line["update"] for line in lines]
    for row, line in zip(server.history[run], lines, strict=True):
        assert all(row[key] == line[key] for key in line if key != "update" and not key.startswith("time/"))


@pytest.mark.parametrize("ahead", [True, False])
def test_wandb_has_each_update_once_whether_it_was_ahead_of_the_checkpoint_or_behind(runs, server, ahead, monkeypatch):
    args, log = own(runs, "sft", f"ahead_{ahead}", save_every=1), runs.root / f"ahead_{ahead}.phases"
    if not ahead:
        monkeypatch.setenv("WANDB_MODE", "offline")
    child = start("sft", args, log)
    wait_for(log, ("leave", "optimizer_step"), 3)
    os.kill(child, signal.SIGUSR1)
    assert finish(child) == 75
    if ahead:  # the server has an update that is done again
        newest = sorted(Path(args.output_dir, "checkpoints").iterdir())[-1]
        shutil.rmtree(newest)
        run = (Path(args.output_dir) / "wandb_id.txt").read_text()
        assert server.history[run][-1]["_step"] == int(newest.name.removeprefix("update_"))
    else:
        monkeypatch.setenv("WANDB_MODE", "online")
        assert not server.history
    assert finish(start("sft", replace(args, resume=True))) == 0, said(args)[-2000:]
    check_history(args, server)
    assert "less than the current step" not in said(args)  # W&B's warning about a step that it has already


def test_wandb_that_goes_away_costs_nothing(runs, server):
    args, log = own(runs, "sft", "wandb_gone"), runs.root / "wandb_gone.phases"
    child = start("sft", args, log)
    wait_for(log, ("leave", "optimizer_step"), 2)
    server.stop()
    assert finish(child) == 0, said(args)[-2000:]
    found = left_behind(Path(args.output_dir))
    assert [key for key in found if key != "W&B" and found[key] != runs.whole["sft"][key]] == []
    [run] = (Path(args.output_dir) / "wandb").glob("run-*")
    assert f"wandb sync {run}" in said(args)
    [file] = run.glob("*.wandb")
    assert sorted(kill_runs.wandb_history(file)) == [line["update"] for line in found["metrics"]]


def test_secrets_are_nowhere_in_a_run_folder(runs, monkeypatch):
    secrets = {"HF_TOKEN": "hf_" + "qWeRtZuI" * 4, "WANDB_API_KEY": "9f8e" * 10}
    for name, secret in secrets.items():
        monkeypatch.setenv(name, secret)
    args = own(runs, "ppo", "secrets")
    assert finish(start("ppo", args)) == 0
    files = [Path(f"{args.output_dir}.log"), *(x for x in Path(args.output_dir).rglob("*") if x.is_file())]
    assert any(x.suffix == ".wandb" for x in files) and len(files) > 15
    for file in files:
        assert not [name for name, secret in secrets.items() if secret.encode() in file.read_bytes()], file


# ---- code in place of data --------------------------------------------------------------------------------------


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_the_payload_works(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    torch.save({"x": Payload(tmp_path / "ran_too")}, tmp_path / "file.bin")
    torch.load(tmp_path / "file.bin", weights_only=False)
    assert (tmp_path / "ran").exists() and (tmp_path / "ran_too").exists()


def with_payload(source: Path, folder: Path, ran: Path) -> str:
    """A copy of a model whose only weights are a .bin file with code in it."""
    shutil.copytree(source, folder)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state | {"more": Payload(ran)}, folder / "pytorch_model.bin")
    return str(folder)


def test_no_code_runs_from_a_model(runs, tmp_path):
    ran = tmp_path / "ran"
    sft_model = with_payload(runs.root / "sft" / "model", tmp_path / "sft", ran)
    reward_model = with_payload(runs.root / "reward" / "model", tmp_path / "reward", ran)
    cases = [
        ("sft", {"model": sft_model}),
        ("reward", {"sft_model_path": sft_model}),
        ("dpo", {"sft_model_path": sft_model}),
    ]
    cases += [("ppo", {"sft_model_path": sft_model}), ("ppo", {"reward_model_paths": [reward_model]})]
    for i, (stage, changes) in enumerate(cases):
        assert "cannot be read" in refuse(own(runs, stage, f"payload_{i}", **changes), stage)
        assert not ran.exists()


def test_plain_weights_in_a_bin_file_are_read(runs, tmp_path):
    changes = {}
    for flag, name in (("sft_model_path", "sft"), ("reward_model_paths", "reward")):
        shutil.copytree(runs.root / name / "model", tmp_path / name)
        state = load_file(tmp_path / name / "model.safetensors")
        (tmp_path / name / "model.safetensors").unlink()
        torch.save(state, tmp_path / name / "pytorch_model.bin")
        changes[flag] = str(tmp_path / name) if flag == "sft_model_path" else [str(tmp_path / name)]
    args = own(runs, "ppo", "bin", **changes)
    assert finish(start("ppo", args)) == 0, said(args)[-2000:]
    assert left_behind(Path(args.output_dir))["weights"] == runs.whole["ppo"]["weights"]


def test_no_code_runs_from_a_checkpoint(runs, stopped, tmp_path):
    for name in ("optimizer.bin", "random_states_0.pkl"):
        args = own(runs, "sft", f"payload_{name}")
        shutil.copytree(stopped, args.output_dir)
        file = Path(args.output_dir) / "checkpoints" / "update_000006" / name
        content = torch.load(file, weights_only=False)
        torch.save(content | {"more": Payload(tmp_path / "ran")}, file)
        listed = json.loads((file.parent / "complete.json").read_text())
        listed["files"][name] = file.stat().st_size
        (file.parent / "complete.json").write_text(json.dumps(listed))
        finish(start("sft", replace(args, resume=True)))
        assert ("cannot be read" in said(args)) == (name == "optimizer.bin")  # the other holds nothing that is needed
        assert not (tmp_path / "ran").exists()


def test_no_code_runs_from_a_config(runs, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(runs.root / "sft" / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "stranger",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(
        f"import os\nos.system('touch {tmp_path}/ran')\nclass Config: pass\nclass Model: pass\n"
    )
    message = refuse(own(runs, "sft", "code", model=str(folder)), "sft")
    assert "cannot be read" in message or "no tokenizer" in message
    assert not (tmp_path / "ran").exists()


def test_no_code_runs_from_a_data_folder(runs, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(runs.args["sft"].dataset, folder)
    for file in folder.rglob("*.arrow"):
        file.write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    (folder / "data.py").write_text(f"import os\nos.system('touch {tmp_path}/ran')\n")
    assert "neither a data set folder" in refuse(own(runs, "sft", "data_code", dataset=str(folder)), "sft")
    assert not (tmp_path / "ran").exists()


if __name__ == "__main__":  # one of two ranks
    STAGES[sys.argv[1]].main(STAGES[sys.argv[1]].Args(**json.loads(Path(sys.argv[2]).read_text())))
