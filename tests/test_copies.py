"""Helpers are copied between scripts, not imported: the copies are the same text, and no script imports another."""

import ast
import difflib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_OURS = {"tests", "data", "runs", "wandb"}  # tests, and what git ignores
DIFFER = {"main", "Args"}  # what every script has of its own
SCRIPTS = sorted(
    path
    for path in ROOT.rglob("*.py")
    if not NOT_OURS & set(path.relative_to(ROOT).parts) and not any(p[0] == "." for p in path.relative_to(ROOT).parts)
)
CONSTANTS = {"FACTS", "FREE_WORDS", "WORD_PENALTY", "REPEAT_PENALTY"}  # of the truth; other constants may differ


def definitions(source: str) -> dict[str, str]:
    """The text of every top-level function, class and constant of the truth, decorators and a comment behind the last
    line included."""
    lines = source.splitlines(keepends=True)
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name, first = node.name, min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in CONSTANTS:
            name, first = node.targets[0].id, node.lineno
        else:
            continue
        assert name not in found, f"{name} is defined twice"
        found[name] = "".join(lines[first - 1 : node.end_lineno])
    return found


def differences(sources: dict[str, str]) -> list[str]:
    """One line-by-line difference for every definition whose text is not that of the first script that has it."""
    first, found = {}, []
    for script, source in sources.items():
        for name, text in definitions(source).items():
            if name in DIFFER:
                continue
            other, other_text = first.setdefault(name, (script, text))
            if text != other_text:
                lines = difflib.unified_diff(
                    other_text.splitlines(), text.splitlines(), f"{other}: {name}", f"{script}: {name}", lineterm=""
                )
                found.append("\n".join(lines))
    return found


def imports_of_ours(source: str, ours: set[str]) -> list[str]:
    """Import statements, nested ones and import_module("…") included, that name a file or folder of ours."""
    found = []
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


OURS = {path.stem for path in SCRIPTS} | {path.relative_to(ROOT).parts[0] for path in SCRIPTS if path.parent != ROOT}


def test_the_stage_scripts_are_among_the_compared():
    assert {"tldr_dataset.py", "sft.py", "reward.py", "ppo.py", "dpo.py"} <= {path.name for path in SCRIPTS}
    shared = set(definitions((ROOT / "sft.py").read_text())) & set(definitions((ROOT / "ppo.py").read_text()))
    assert {"fail", "data_order", "generate", "MetricsLog", "accumulate"} <= shared


@pytest.mark.parametrize("script", ["truth.py", "posts.py", "report.py"])
def test_the_truth_is_among_the_compared(script):
    source = (ROOT / "quickstart" / script).read_text()
    assert CONSTANTS | {"find_facts", "score"} <= set(definitions(source))
    if script == "truth.py":  # no other constant that score could depend on
        assert CONSTANTS == {node.targets[0].id for node in ast.parse(source).body if isinstance(node, ast.Assign)}


def test_same_name_same_text():
    found = differences({str(path.relative_to(ROOT)): path.read_text() for path in SCRIPTS})
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_script_imports_another(script):
    assert not imports_of_ours(script.read_text(), OURS)


SOURCE = '''
import contextlib

FREE_WORDS = 24  # no penalty
FACTS = {
    "age": ["18"],
}
PANELS = 3


@contextlib.contextmanager
def pause(seconds: int):
    """Wait."""
    yield seconds  # why


class Log:
    size = 1

    def write(self, text):
        return text


def main():
    pass
'''


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("yield seconds", "yield Seconds", "pause"),
        ("# why", "# who", "pause"),
        ('"""Wait."""', '"""Wait!"""', "pause"),
        ("seconds: int", "seconds:int", "pause"),
        ("@contextlib.contextmanager", "@contextlib.contextmanageR", "pause"),
        ("return text", "return  text", "Log"),
        ("size = 1", "size = 2", "Log"),
        ("FREE_WORDS = 24", "FREE_WORDS = 25", "FREE_WORDS"),
        ("# no penalty", "# no Penalty", "FREE_WORDS"),
        ('"18"', '"19"', "FACTS"),
    ],
)
def test_a_difference_of_one_character_is_found(old, new, name):
    assert SOURCE.count(old) == 1
    assert differences({"a.py": SOURCE, "b.py": SOURCE}) == []
    found = differences({"a.py": SOURCE, "b.py": SOURCE.replace(old, new)})
    assert len(found) == 1 and found[0].startswith(f"--- a.py: {name}\n+++ b.py: {name}")


def test_main_and_other_constants_may_differ_and_an_added_decorator_may_not():
    assert differences({"a.py": SOURCE, "b.py": SOURCE.replace("    pass", "    return 1")}) == []
    assert differences({"a.py": SOURCE, "b.py": SOURCE.replace("PANELS = 3", "PANELS = 4")}) == []
    assert len(differences({"a.py": SOURCE, "b.py": SOURCE.replace("class Log", "@str\nclass Log")})) == 1


@pytest.mark.parametrize(
    "line",
    ["import ppo", "from sft import generate", "import os, quickstart.nano", "from . import sft", "from .sft import x"]
    + ["def f():\n    from reward import last_token", "importlib.import_module('ppo')", "__import__('dpo')"],
)
def test_an_import_of_ours_is_found(line):
    assert imports_of_ours(line, OURS)
    assert not imports_of_ours("import os\nfrom torch import nn\nimport tyro.conf", OURS)
