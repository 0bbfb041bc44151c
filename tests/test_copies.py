"""Helpers are copied between scripts, not imported. The copies are the same code and comments, but for a short list of
named exceptions; a docstring may leave out what its script does not use. The stage scripts end in one block of
plumbing, docstrings and all. No stage script imports another; tools, which nobody copies, take what they need from
them. All of this for the project's own files, which are listed here: a user's copies and edits are not looked at."""

import ast
import difflib
from pathlib import Path

import pytest
from conftest import ROOT

STAGES = ["sft.py", "reward.py", "ppo.py", "dpo.py", "ensembles/ppo.py", "llama2/reward.py"]
STAGES += [f"variants/{name}.py" for name in ("rloo", "grpo", "online_dpo")]
OURS = [
    *STAGES,
    "tldr_dataset.py",
    "ablations/price.py",
    *(f"benchmark/{name}.py" for name in ("convert_released", "plan", "smollm2")),
    *(f"benchmark/speed/{name}.py" for name in ("authors_peer", "speed", "trl_peer")),
    *(f"ensembles/{name}.py" for name in ("alpaca_dataset", "average", "best_of_n", "figures", "gold_label", "study")),
    *(f"eval/{name}.py" for name in ("check_data", "eval_helpers", "figures", "gold", "judge", "rm_report", "samples")),
    "eval/visualize_tokens.py",
    *(f"llama2/{name}.py" for name in ("margins", "preference_dataset")),
    *(f"quickstart/{name}.py" for name in ("curves", "metric", "nano", "posts", "pretrain", "report")),
    *(f"quickstart/{name}.py" for name in ("paired", "score", "truth")),
]
MARK = "# ==== data"
DIFFER = {"main", "Args"}  # what every script has of its own
# functions that a copy changes under their old name, which keeps its diff short: one text among the scripts listed here
CHANGED = {
    "forward_passes": ["variants/rloo.py", "variants/grpo.py", "variants/online_dpo.py"],
    "pair_table": ["llama2/reward.py"],
    "accuracy_table": ["llama2/reward.py"],
}


def text_of(script: str) -> str:
    return (ROOT / script).read_text()


def docstring_lines(node: ast.AST) -> set[int]:
    """The numbers of the lines that are docstrings of it or of what is defined in it."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(inner):
            found |= set(range(inner.body[0].lineno, inner.body[0].end_lineno + 1))
    return found


def definitions(source: str) -> dict[str, str]:
    """The text of every top-level function and class, without docstrings, but with decorators and a comment behind the
    last line."""
    lines = source.splitlines(keepends=True)
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name, first = node.name, min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        else:
            continue
        assert name not in found, f"{name} is defined twice"
        said = docstring_lines(node)
        found[name] = "".join(lines[i - 1] for i in range(first, node.end_lineno + 1) if i not in said)
    return found


def differences(sources: dict[str, str]) -> list[str]:
    """One line-by-line difference for every definition whose text is not that of the first script that has it."""
    first, found = {}, []
    for script, source in sources.items():
        for name, text in definitions(source).items():
            if name in DIFFER:
                continue
            is_changed = script in CHANGED.get(name, [])
            other, other_text = first.setdefault((name, is_changed), (script, text))
            if text != other_text:
                lines = difflib.unified_diff(
                    other_text.splitlines(), text.splitlines(), f"{other}: {name}", f"{script}: {name}", lineterm=""
                )
                found.append("\n".join(lines))
    return found


def imports_of_ours(source: str) -> list[str]:
    """Import statements, nested ones and import_module("…") included, that name a file or folder of ours."""
    ours, found = {Path(script).stem for script in OURS} | {Path(script).parts[0] for script in OURS}, []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." if node.level else node.module]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
                names = [str(node.args[0].value)]
        found += [f"line {node.lineno}: {name}" for name in names if name == "." or name.split(".")[0] in ours]
    return found


def test_the_stage_scripts_end_in_one_block():
    blocks = {script: text_of(script)[text_of(script).index(MARK) :] for script in STAGES}
    assert all(text_of(script).count(MARK) == 1 for script in STAGES)
    assert [script for script in STAGES if blocks[script] != blocks["ppo.py"]] == []
    assert {"fail", "start_or_resume", "updates", "writing", "prepare"} <= set(definitions(blocks["ppo.py"]))


def test_the_block_needs_nothing_of_a_stage():
    """But imports, main, Args and STAGE, and its own constants: it can end any other stage's script."""
    block = text_of("ppo.py")[text_of("ppo.py").index(MARK) :]
    loaded = {node.id for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Name)}
    assert loaded & set(definitions(text_of("ppo.py"))) - set(definitions(block)) == {"main", "Args"}
    constants = {x.targets[0].id for x in ast.parse(text_of("ppo.py")).body if isinstance(x, ast.Assign)}
    own = {x.targets[0].id for x in ast.parse(block).body if isinstance(x, ast.Assign)}
    assert loaded & constants == {"STAGE", *own} and "MAY_CHANGE" in own


def test_same_name_same_text():
    """Of every name that a stage script or the data script defines; tools may use other names twice."""
    shared = set().union(*(definitions(text_of(script)) for script in [*STAGES, "tldr_dataset.py"]))
    found = differences({script: text_of(script) for script in OURS})
    found = [text for text in found if text.partition("\n")[0].rpartition(": ")[2] in shared]
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize("script", [*STAGES, "tldr_dataset.py"])
def test_no_script_imports_another(script):
    assert not imports_of_ours(text_of(script))


def test_a_named_exception_is_one_text_among_its_scripts():
    source = "def forward_passes():\n    return 1\n"
    other = source.replace("1", "2")
    assert differences({"ppo.py": source, "variants/rloo.py": other, "variants/grpo.py": other}) == []
    assert len(differences({"ppo.py": source, "variants/rloo.py": other, "variants/grpo.py": source})) == 1
    assert len(differences({"ppo.py": source, "ensembles/ppo.py": other})) == 1
