"""What a reader has to read: how long the scripts are, how dense their lines, and how far a copy for another paper is
from what it copies. `python tests/test_sizes.py` prints all of it beside its limits.

Density is a mean over code lines (no docstrings, comments, blank lines). Characters: without indentation and trailing
comment. Actions: statements; each value of a tuple assignment beyond the first, each further target, each comprehension
and each ternary counts as one more. For comparison, with the same measure: CleanRL's ppo.py has 37 characters, 0.88
actions, 9.6 tokens and 5 % of its lines over 100 columns; nanochat's chat_rl.py 50, 0.84, 8.9 and 14 %."""

import ast
import io
import re
import statistics
import subprocess
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {
    "ppo.py: lines": 1125,
    "ppo.py: characters": 61_900,
    "ppo.py: last line of main": 400,
    "reward.py: lines": 822,
    "dpo.py: lines": 795,
    "sft.py: lines": 575,
    "tldr_dataset.py: lines": 785,
    "plumbing: lines": 300,
    "README.md: lines": 250,
    "ppo.py to ensembles/ppo.py: lines of the diff": 380,
    "reward.py to llama2/reward.py: lines of the diff": 220,
}
# means a code line: characters, actions, tokens; share over 100 columns
DENSITY = {
    "ppo.py": (49, 0.95, 11.6, 0.11),
    "reward.py": (51, 0.98, 11.8, 0.11),
    "dpo.py": (51, 0.98, 11.8, 0.11),
    "sft.py": (51, 0.98, 11.8, 0.11),
    "tldr_dataset.py": (51, 0.98, 11.8, 0.11),
}
COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp)
NO_CODE = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT)
# an f-string is one token, as up to Python 3.11
FSTRING_START, FSTRING_END = getattr(tokenize, "FSTRING_START", -1), getattr(tokenize, "FSTRING_END", -1)


def is_text(node: ast.AST) -> bool:
    """A docstring, or the text under an argument."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def code_lines(source: str) -> tuple[list[str], int]:
    """The lines that hold code, and the number of their tokens."""
    texts = [node for node in ast.walk(ast.parse(source)) if is_text(node)]
    no_code = {line for node in texts for line in range(node.lineno, node.end_lineno + 1)}
    numbers, tokens, depth = set(), 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        depth -= token.type == FSTRING_END
        if token.type not in NO_CODE and token.start[0] not in no_code:
            tokens += depth == 0 and token.type != FSTRING_END
            numbers |= set(range(token.start[0], token.end[0] + 1))
        depth += token.type == FSTRING_START
    lines = source.split("\n")
    return [lines[number - 1] for number in sorted(numbers)], tokens


def actions(node: ast.AST) -> int:
    """What one node of the syntax tree does, without what is inside."""
    count = isinstance(node, ast.stmt) and not is_text(node)
    if isinstance(node, ast.Assign):
        count += len(node.targets) - 1
        if isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple):
            count += len(node.value.elts) - 1
    return count + isinstance(node, (ast.IfExp, *COMPREHENSIONS))


def density(source: str) -> tuple[float, float, float, float]:
    """The numbers of DENSITY of one file's text."""
    lines, tokens = code_lines(source)
    characters = statistics.mean(len(line.split("  #")[0].strip()) for line in lines)
    over = sum(len(line) > 100 for line in lines)
    done = sum(actions(node) for node in ast.walk(ast.parse(source)))
    return characters, done / len(lines), tokens / len(lines), over / len(lines)


def diff_lines(script: str, copy: str) -> int:
    """Lines added and removed."""
    command = ["git", "diff", "--no-index", "--shortstat", script, copy]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    return sum(int(count) for count in re.findall(r"(\d+) (?:insertion|deletion)", said))


def without_docstring(source: str) -> str:
    """A script's text without the module docstring."""
    return "".join(source.splitlines(keepends=True)[ast.parse(source).body[0].end_lineno :])


def sizes() -> dict[str, int]:
    """The numbers of LIMITS, as they are."""
    found = {}
    for name in LIMITS:
        file, _, what = name.partition(": ")
        if what == "lines of the diff":
            found[name] = diff_lines(*file.split(" to "))
            continue
        text = (ROOT / ("ppo.py" if file == "plumbing" else file)).read_text()
        if file == "plumbing":
            text = text[text.index("# ==== plumbing") :]
        if what == "last line of main":  # up to the rule of the next section
            text = text[: text.index("# ====", text.index("\ndef main("))].rstrip() + "\n"
        found[name] = len(text) if what == "characters" else text.count("\n")
    return found


@pytest.mark.parametrize("name", LIMITS)
def test_size(name):
    assert 0 < sizes()[name] <= LIMITS[name]


@pytest.mark.parametrize("script", DENSITY)
def test_density(script):
    found = density((ROOT / script).read_text())
    assert all(number <= limit for number, limit in zip(found, DENSITY[script], strict=True)), found


def test_density_by_hand():
    source = (
        '"""Text."""\na, b = 1, 2  # two\nfor x in [y for y in c]:\n    """Text."""\n    d = e = f"{x}" if x else 0\n'
    )
    lines, tokens = code_lines(source)
    assert lines == [line for line in source.splitlines() if "Text" not in line]
    assert tokens == 7 + 11 + 9  # a , b = 1 , 2; for x in [ y for y in c ] :; d = e = f"{x}" if x else 0
    assert sum(actions(node) for node in ast.walk(ast.parse(source))) == 2 + 2 + 3
    characters = (len("a, b = 1, 2") + len("for x in [y for y in c]:") + len('d = e = f"{x}" if x else 0')) / 3
    assert density(source) == pytest.approx((characters, 7 / 3, 27 / 3, 0))
    assert density("x = 1\n" + "y" * 101 + "\n")[3] == 0.5


if __name__ == "__main__":
    for name, size in sizes().items():
        print(f"{name:<50} {size:>6,} of {LIMITS[name]:>6,}")
    print(f"\n{'means a code line':<20}{'characters':>18}{'actions':>18}{'tokens':>18}{'over 100':>18}")
    for script, limits in DENSITY.items():
        found = density((ROOT / script).read_text())
        columns = [f"{x:.1%} of {y:.0%}" if y < 0.5 else f"{x:.2f} of {y}" for x, y in zip(found, limits, strict=True)]
        print(f"{script:<20}" + "".join(f"{column:>18}" for column in columns))
