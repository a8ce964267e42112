"""Write the table of statistics into README.md from `entropy_monitor.names.STATISTICS`.

python scripts/update_readme.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from entropy_monitor.names import STATISTICS  # noqa: E402

BEGIN, END = "<!-- statistics: begin -->", "<!-- statistics: end -->"


def table() -> str:
    """One line per statistic, as Markdown."""
    lines = ["| tag `attention/…` | formula | unit | how to read it |", "|---|---|---|---|"]
    lines += [f"| `{s.name}` | `{s.formula}` | {s.unit} | {s.doc} |" for s in STATISTICS]
    return "\n".join(lines)


def updated(readme: str) -> str:
    """README with the table of now between the two marks."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
