"""Push a run's models to the Hub: a branch of a repository per run, with a card that says how it was made.

    python benchmark/push.py runs/ppo/1b/44413 --hub-id me/pythia-1b-ppo-tldr
    python benchmark/push.py runs/ppo/1b/44413 --hub-id me/pythia-1b-ppo-tldr --hub-revision main

It takes the runs of any stage script, ours or a copy with a STAGE of its own. The branch (default ppo__1b__44413) gets
the weights and the tokenizer, of PPO the value model in value_model/ as well, metrics.jsonl, args.json, eval/ and the
card, README.md. It loads by `me/pythia-1b-ppo-tldr@ppo__1b__44413` wherever a stage takes a path.
"""

import json
import sys
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated

import pandas
import tyro
from huggingface_hub import CommitOperationAdd, HfApi, ModelCardData
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).resolve().parents[1] / "eval"))

from eval_helpers import fail, markdown, one_line  # noqa: E402
from run_metrics import read_metrics  # noqa: E402

BASES = {size: f"EleutherAI/pythia-{size}-deduped" for size in ("1b", "2.8b", "6.9b")}  # under Apache 2.0
PANELS = 4  # of the figure
ABOUT = ("stage", "processes", "wandb_id")  # of args.json, beside the arguments
LONGEST_TABLE = 40  # rows in the card; eval/ has all


@dataclass
class Args:
    run: Annotated[str, tyro.conf.Positional]
    """run folder of a stage, with model/ in it"""
    hub_id: str
    """repository, `owner/name`; made if it is not there"""
    hub_revision: str | None = None
    """branch, made if it is not there; default {stage}__{model}__{seed}"""


def curves(lines: list[dict], keys: list[str]) -> bytes:
    """A PNG with a panel for each of the metrics `keys` that the run has, against the update."""
    keys = [key for key in keys if any(key in line for line in lines)]
    figure = Figure(figsize=(4 * max(len(keys), 1), 3), layout="constrained")
    for panel, key in zip(figure.subplots(1, max(len(keys), 1), squeeze=False)[0], keys, strict=False):
        points = [(line["update"], line[key]) for line in lines if key in line]
        panel.plot(*zip(*points, strict=True), marker="." if len(points) < 20 else "")
        panel.set(title=key, xlabel="update")
    figure.savefig(image := BytesIO(), format="png", dpi=100)
    return image.getvalue()


def loading_class(config: dict) -> str:
    """The class of transformers that loads a model of this config.json: a reward model's or a policy's."""
    reward = config["architectures"][0].endswith("ForSequenceClassification")
    return "AutoModelForSequenceClassification" if reward else "AutoModelForCausalLM"


def card(stage: str, load: str, settings: dict, lines: list[dict], tables: dict[str, list[dict]], hub: str) -> str:
    """The text of README.md: what the run was, how to load it (by the class `load`), last metrics, tables of the
    evaluation, arguments."""
    base = BASES.get(settings["model"])
    licence = {"license": "apache-2.0", "base_model": base} if base else {"license": "other"}
    names = [settings[key] for key in ("dataset", "preference_dataset") if key in settings]
    data = {"datasets": [name.partition("@")[0] for name in names if not Path(name).exists()]}
    about = ModelCardData(**licence, **data, library_name="transformers", tags=["rlhf", "summarization", stage])
    repository, _, revision = hub.partition("@")
    last = {key: value for key, value in lines[-1].items() if key != "update"}
    text = f"---\n{about}\n---\n\n# {stage} of {base or settings['model']}, seed {settings['seed']}\n\n"
    text += f"Made by `{settings['stage']}.py` with the arguments below, and loaded by\n\n"
    text += f"```python\nfrom transformers import {load}"
    text += f'\n\nmodel = {load}.from_pretrained("{repository}", revision="{revision}")\n```\n\n'
    if load == "AutoModelForSequenceClassification":
        text += "The reward is this model's logit minus `reward_mean` of its config, a constant.\n\n"
    licence = "Apache 2.0, as its base model." if base else f"that of its base model, {settings['model']}."
    text += f"Licence: {licence}\n\n![curves](curves.png)\n\n## Metrics of update {lines[-1]['update']}\n\n"
    text += markdown([{"metric": key, "value": value} for key, value in last.items()])
    for name, rows in tables.items():
        text += f"\n## {name}\n\n{markdown(rows[:LONGEST_TABLE])}"
        text += f"\n{len(rows) - LONGEST_TABLE} more rows in eval/{name}.csv\n" if len(rows) > LONGEST_TABLE else ""
    arguments = [{"argument": f"`{key}`", "value": f"`{value}`"} for key, value in settings.items() if key not in ABOUT]
    return f"{text}\n## Arguments\n\n{markdown(arguments)}"


def main(args: Args):
    run = Path(args.run)
    for name in ("model/config.json", "args.json", "metrics.jsonl"):
        if not (run / name).exists():
            fail(f"{run}: no {name} there; name the folder of a run that has ended")
    settings = json.loads((run / "args.json").read_text())
    lines = read_metrics(run)
    stage, model = settings["stage"], settings["model"]
    name = Path(model if Path(model).exists() else model.partition("@")[0]).name
    name = f"{stage}__{name}__{settings['seed']}"
    revision = args.hub_revision or name
    tables = {path.stem: pandas.read_csv(path).to_dict("records") for path in sorted(run.glob("eval/*.csv"))}
    tables = {stem: rows for stem, rows in tables.items() if not stem.startswith(("samples_", "pairs_"))}
    files = {path.name: path for path in sorted((run / "model").iterdir())}
    for folder in ("value_model", "eval"):
        files |= {f"{folder}/{path.name}": path for path in sorted(run.glob(f"{folder}/*"))}
    files |= {name: run / name for name in ("args.json", "metrics.jsonl")}
    files |= {"curves.png": curves(lines, [key for key in lines[-1] if key != "update"][:PANELS])}
    load = loading_class(json.loads((run / "model" / "config.json").read_text()))
    files |= {"README.md": card(stage, load, settings, lines, tables, f"{args.hub_id}@{revision}").encode()}
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in files.items()]
    api = HfApi()
    try:
        api.create_repo(args.hub_id, exist_ok=True)
        api.create_branch(args.hub_id, branch=revision, exist_ok=True)
        api.create_commit(args.hub_id, operations, commit_message=name, revision=revision)
    except Exception as error:  # of many kinds; the run is safe on disk
        fail(f"the push to {args.hub_id} failed ({one_line(error)}); {run} is complete, run this again to push it")
    print(f"pushed {run} to {args.hub_id}@{revision}")


if __name__ == "__main__":
    main(tyro.cli(Args))
