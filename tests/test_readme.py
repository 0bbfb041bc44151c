"""README's links to lines: every link of the form [`snippet`](file#L12) points at a line that holds the snippet.
README's table of speed: it says what benchmark/results/throughput.csv says.

`python tests/test_readme.py` rewrites both after an edit of the scripts or another measurement.
"""

import csv
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[`([^`]+)`\]\(([\w/.]+)#L(\d+)\)")


def found_lines(snippet: str, file: str) -> list[int]:
    """1-based numbers of the lines of `file` that hold `snippet`."""
    lines = (REPOSITORY / file).read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if snippet in line]


def test_links_point_at_the_lines_they_name():
    links = LINK.findall((REPOSITORY / "README.md").read_text())
    wrong = [link for link in links if found_lines(link[0], link[1])[:1] != [int(link[2])]]
    assert not wrong, "run python tests/test_readme.py"
    assert len(links) >= 25


def test_all_25_details_have_a_row():
    rows = re.findall(r"^\| (\d+) \| .*$", (REPOSITORY / "README.md").read_text(), re.MULTILINE)
    assert [int(number) for number in rows] == list(range(1, 26))


def test_local_links_and_pictures_exist():
    targets = re.findall(r"\]\(([\w/.]+?)(?:#L\d+)?\)", (REPOSITORY / "README.md").read_text())
    assert targets and not [target for target in targets if not (REPOSITORY / target).exists()]


def speed_table() -> str:
    """throughput.csv as README shows it: a line per measurement, ours beside TRL's."""
    with (REPOSITORY / "benchmark/results/throughput.csv").open() as file:
        rows = {row["stage"] + row["who"]: row for row in csv.DictReader(file)}
    lines = [
        "| stage | ours, items/s | TRL, items/s | ratio (least, most) | of a matrix product | peak GiB |",
        "|" + "---|" * 6,
    ]
    for row in rows.values():
        if row["who"].startswith("ours"):
            peer = rows[row["stage"] + row["who"].replace("ours", "trl")]
            cells = [row["stage"] + row["who"].removeprefix("ours"), row["items/s"], peer["items/s"]]
            cells += [f"**{peer['ours is faster by']}** ({peer['least, most']})", row["of a matrix product"]]
            lines.append("| " + " | ".join([*cells, f"{row['peak GiB']}, TRL {peer['peak GiB']}"]) + " |")
    return "\n".join(lines) + "\n"


def test_the_table_of_speed_is_what_was_measured():
    assert speed_table() in (REPOSITORY / "README.md").read_text(), "run python tests/test_readme.py"


if __name__ == "__main__":
    readme = REPOSITORY / "README.md"
    text = LINK.sub(lambda m: f"[`{m[1]}`]({m[2]}#L{found_lines(m[1], m[2])[0]})", readme.read_text())
    text = re.sub(r"\| stage \| ours, items/s .*\n(\|.*\n)+", lambda _: speed_table(), text)
    readme.write_text(text)
