"""``entropy-monitor report``: what a recorded run says about its attention entropy."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from entropy_monitor.report.build import Report, build_report

DESCRIPTION = """\
Why did attention entropy change? Reads the record of a run, trained or replayed, at any time.

  entropy-monitor report runs/gpt
  entropy-monitor report runs/gpt --baseline 1000 --last 5000
  entropy-monitor report runs/gpt --json
  entropy-monitor report runs/gpt --html report.html --png report.png --csv heads.csv"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``report``."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", help="folder of the run, or a parent with exactly one")
    parser.add_argument(
        "--baseline",
        type=int,
        metavar="STEP",
        help="step to count the change from (default: the run's own baseline)",
    )
    parser.add_argument(
        "--last", type=int, metavar="STEP", help="step to count to (default: the last)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--all", action="store_true", help="print every layer and every head")
    parser.add_argument(
        "--heads", type=int, default=8, metavar="N", help="heads to list (default: %(default)s)"
    )
    files = parser.add_argument_group("files")
    files.add_argument("--csv", type=Path, metavar="FILE", help="one line per step, layer and head")
    files.add_argument("--parquet", type=Path, metavar="FILE", help="the same as parquet (pyarrow)")
    files.add_argument("--png", type=Path, metavar="FILE", help="a figure (matplotlib)")
    files.add_argument("--html", type=Path, metavar="FILE", help="the dashboard as one file")


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    try:
        report = build_report(args.run, baseline=args.baseline, last=args.last)
        written = _write_files(report, args)
    except ImportError as error:
        extra = {"pyarrow": "parquet"}.get((error.name or "").split(".")[0], "report")
        return _refuse(f"{error}; pip install 'entropy-monitor[{extra}]'")
    except (ValueError, OSError) as error:
        return _refuse(str(error))
    if args.json:
        sys.stdout.write(report.to_json() + "\n")
        return 0
    layers, heads = (None, report.run.heads) if args.all else (16, args.heads)
    sys.stdout.write(report.to_text(layers=layers, heads=max(0, heads)))
    sys.stdout.write("".join(f"Written: {path}\n" for path in written))
    return 0


def _write_files(report: Report, args: argparse.Namespace) -> list[Path]:
    kinds: tuple[tuple[Path | None, Callable[[Path], None]], ...] = (
        (args.csv, report.to_csv),
        (args.parquet, report.to_parquet),
        (args.png, report.to_png),
        (args.html, lambda path: _write_html(report, path)),
    )
    written = []
    for path, write in kinds:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
            written.append(path)
    return written


def _write_html(report: Report, path: Path) -> None:
    from entropy_monitor.report.html import write_html

    write_html(report.run, path)


def _refuse(message: str) -> int:
    sys.stderr.write(f"entropy-monitor report: {message}\n")
    return 2
