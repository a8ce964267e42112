"""`entropy-monitor demo`: train twice, say what happened, draw it, and say where the logs are."""

import argparse
import json
import math
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entropy_monitor.demo.words import nats, percent, split_of, verdict
from entropy_monitor.notebook import PALETTE, signed

if TYPE_CHECKING:
    from rich.console import Console

    from entropy_monitor.demo.train import Twin

_NEEDED = ("torch", "pytorch_lightning", "transformers", "tensorboard", "matplotlib", "rich")
_BAR = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data (default: 0)")
    parser.add_argument(
        "--steps",
        type=int,
        default=256,
        help="optimiser steps of each training (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("entropy-monitor-demo"),
        help="folder for logs and picture, emptied of an older demo (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    missing = [name for name in _NEEDED if not _is_there(name)]
    if missing:
        print(f"The demo needs {', '.join(missing)}: pip install 'entropy-monitor[demo]'")  # noqa: T201
        return 2
    if args.steps < 1 or not 0 <= args.seed < 2**32:
        bad = (
            f"--steps must be at least 1, got {args.steps}"
            if args.steps < 1
            else f"--seed must be >= 0, got {args.seed}"
        )
        print(f"entropy-monitor demo: {bad}.")  # noqa: T201
        return 2
    from rich.console import Console

    console = Console(highlight=False)
    folder: Path = args.out
    _make_room(folder)
    started = time.monotonic()
    console.print(
        "\n  Two small transformers (1 layer, 1 head) learn which letter follows which in Jane "
        "Austen;\n  after [bold]t[/], [bold]e[/] and [bold]n[/] they must repeat the letter "
        "before it. They differ in one thing:\n  whether every text starts with the token "
        "[bold]<bos>[/].\n",
        soft_wrap=True,
    )
    with_bos, without = _train(console, seed=args.seed, steps=args.steps, folder=folder)
    console.print()
    console.print(table(with_bos, without))
    console.print()
    console.print(_bullets(verdict(with_bos, without)))
    picture = folder / "demo.png"
    from entropy_monitor.demo.figure import draw

    draw(with_bos, without, picture, triggers="ten")
    (folder / "demo.json").write_text(
        json.dumps(results(with_bos, without), indent=1) + "\n", encoding="utf-8"
    )
    where = shlex.quote(str(folder))
    console.print(
        f"\n  Picture      [bold]{picture}[/]"
        f"\n  TensorBoard  [bold]tensorboard --logdir {where}[/]"
        "\n               (open the page that it names, then the tab Attention)"
        f"\n  As a table   [bold]entropy-monitor report {where}/with-bos[/]"
        f"\n\n  {time.monotonic() - started:.0f} seconds. In your own training: "
        "[bold]Trainer(callbacks=\\[EntropyMonitor()])[/]\n",
        soft_wrap=True,
    )
    return 0


def results(with_bos: "Twin", without: "Twin") -> dict[str, Any]:
    """The numbers behind the words, as plain types."""
    return {
        name: {
            **twin.summary,
            "sink_mass": [twin.curves["sink_mass"][0], twin.curves["sink_mass"][-1]],
            "total_entropy": [twin.curves["total_entropy"][0], twin.curves["total_entropy"][-1]],
            "trigger_sink": twin.trigger_sink,
            "other_sink": twin.other_sink,
            "copies": twin.copies,
            "loss": twin.loss,
        }
        for name, twin in (("with_bos", with_bos), ("without_bos", without))
    }


def table(with_bos: "Twin", without: "Twin") -> Any:
    """Both attributions side by side, as a rich table."""
    from rich.table import Table
    from rich.text import Text

    twins = (with_bos, without)
    splits = [split_of(twin) for twin in twins]
    widest = max(*(abs(part) for split in splits for part in (split.sink, split.content)), 0.01)

    def bar(part: str, value: float, share: int | None) -> Text:
        text = Text(f"{signed(value, 2):>5}  ")
        text.append("█" * max(round(_BAR * abs(value) / widest), 0), style=PALETTE[part])
        if share is not None:
            text.append(f" {share} %", style="bold")
        return text

    rows: list[tuple[str, list[Any]]] = [
        (
            "attention entropy",
            [f"{nats(split.before)} → {nats(split.after)} nats" for split in splits],
        ),
        ("change", [Text(f"{signed(split.total, 2):>5}", style="bold") for split in splits]),
        ("  made by the sink", [bar("sink", split.sink, split.share) for split in splits]),
        (
            "  made by the content",
            [bar("content", s.content, None if s.share is None else 100 - s.share) for s in splits],
        ),
        (
            "mass on the first token",
            [
                f"{percent(t.curves['sink_mass'][0])} → {percent(t.curves['sink_mass'][-1])}"
                for t in twins
            ],
        ),
        ("  where a copy is due", [percent(twin.trigger_sink) for twin in twins]),
        ("  elsewhere", [percent(twin.other_sink) for twin in twins]),
        ("copies predicted right", [percent(twin.copies) for twin in twins]),
    ]
    shown = Table(box=None, padding=(0, 1), pad_edge=True, header_style="bold")
    shown.add_column("")
    shown.add_column("with <bos>", min_width=_BAR + 13)
    shown.add_column("without <bos>", min_width=_BAR + 13)
    for name, cells in rows:
        shown.add_row(name, *cells)
    return shown


def _bullets(sentences: list[str]) -> Any:
    from rich.padding import Padding
    from rich.table import Table

    lines = Table.grid(padding=(0, 1))
    for sentence in sentences:
        lines.add_row("•", sentence)
    return Padding(lines, (0, 2))


def _train(console: "Console", *, seed: int, steps: int, folder: Path) -> tuple["Twin", "Twin"]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("  {task.description:<14}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[look]}"),
    )
    with Progress(*columns, console=console) as progress:
        waiting = progress.add_task("loading torch", total=None, look="")
        from entropy_monitor.demo.train import Recipe, train_twin

        progress.remove_task(waiting)
        recipe = Recipe(seed=seed, steps=steps)
        twins = []
        for bos in (True, False):
            task = progress.add_task("with <bos>" if bos else "without <bos>", total=steps, look="")

            def tell(step: int, entropy: float, sink: float, task: Any = task) -> None:
                look = (
                    ""
                    if math.isnan(entropy)
                    else f"entropy {nats(entropy)}, first token {percent(sink)}"
                )
                progress.update(task, completed=step, look=look)

            twins.append(
                train_twin(
                    bos=bos,
                    recipe=recipe,
                    folder=folder / ("with-bos" if bos else "without-bos"),
                    tell=tell,
                )
            )
    return twins[0], twins[1]


def _make_room(folder: Path) -> None:
    """Remove what an older demo wrote, and nothing else (two runs in one folder look like one)."""
    import shutil

    folder.mkdir(parents=True, exist_ok=True)
    for name in ("with-bos", "without-bos"):
        if (folder / name / "entropy_monitor" / "record.jsonl").exists():
            shutil.rmtree(folder / name)


def _is_there(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None
