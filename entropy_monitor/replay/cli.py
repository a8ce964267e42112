"""``entropy-monitor replay``: arguments and glue; torch is imported when it runs, not before."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from entropy_monitor.replay.errors import ReplayError
from entropy_monitor.replay.options import OPTIONS, settings_from

DESCRIPTION = """\
Measure a series of checkpoints on the same sequences and write a run, as training would have logged
it.

  entropy-monitor replay EleutherAI/pythia-70m --text corpus.txt --logdir runs/pythia-70m
  entropy-monitor replay ./my_run --text corpus.txt
  entropy-monitor replay ./my_run --tokens ids.npy --rows all --yes

The cost is stated before anything is fetched. A stopped replay goes on with the same command.
Exit code: 0 all measured, 1 some checkpoints were not, 2 the request cannot be carried out."""

_ABSENT: Any = argparse.SUPPRESS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``replay``."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("model", nargs="?", default=_ABSENT, help="folder, weight file, or OWNER/NAME on the hub")
    add(
        "--config",
        default=_ABSENT,
        metavar="FILE",
        help="YAML with any of these options (names with _)",
    )
    add("--logdir", default=_ABSENT, metavar="DIR", help="folder of the run (default: runs/NAME)")
    which = parser.add_argument_group("which checkpoints")
    which.add_argument(
        "--revisions",
        default=_ABSENT,
        metavar="WHICH",
        help="all (default), log (each twice the step before), a number of them, or names and "
        "steps: step0,step512,1000",
    )
    which.add_argument(
        "--baseline",
        default=_ABSENT,
        metavar="NAME",
        help="checkpoint that changes count from (default: the first)",
    )
    which.add_argument(
        "--skip-duplicates",
        action="store_true",
        default=_ABSENT,
        help="of several checkpoints with identical weights keep the last; without it they are "
        "measured and flagged",
    )
    add_sequence_arguments(parser)
    measured = parser.add_argument_group("what is measured")
    measured.add_argument(
        "--rows",
        default=_ABSENT,
        metavar="N|all",
        help="rows per sequence beyond the first 16 (default: 64)",
    )
    measured.add_argument(
        "--sink",
        default=_ABSENT,
        metavar="SINK",
        help="first (default), auto (found on the last checkpoint, then kept), learned, none, "
        "positions such as 0,-1, or tokens:ID,ID",
    )
    add_model_arguments(parser)
    work = parser.add_argument_group("how it runs")
    work.add_argument(
        "--batch",
        type=int,
        default=_ABSENT,
        metavar="N",
        help="sequences at a time (default: by memory)",
    )
    work.add_argument(
        "--threads", type=int, default=_ABSENT, metavar="N", help="CPU threads (default: all cores)"
    )
    work.add_argument(
        "--shard",
        default=_ABSENT,
        metavar="I/N",
        help="measure every N-th checkpoint from the I-th on (0 <= I < N); torchrun sets this",
    )
    work.add_argument(
        "--keep", action="store_true", default=_ABSENT, help="keep downloads, in the hub's cache"
    )
    work.add_argument(
        "--max-download-gb",
        type=float,
        default=_ABSENT,
        metavar="GB",
        help="most that is downloaded without --yes (default: 50)",
    )
    work.add_argument(
        "--yes", action="store_true", default=_ABSENT, help="go on even if it does not seem to fit"
    )
    work.add_argument(
        "--dry-run", action="store_true", default=_ABSENT, help="state the cost and stop"
    )
    work.add_argument(
        "--restart",
        action="store_true",
        default=_ABSENT,
        help="throw away an earlier replay in DIR",
    )
    work.add_argument(
        "--parquet", action="store_true", default=_ABSENT, help="also write heads.parquet"
    )
    work.add_argument("--quiet", action="store_true", help="print the result only")


def add_sequence_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which sequences are shown to the model."""
    group = parser.add_argument_group("sequences (the same for every checkpoint)")
    group.add_argument(
        "--text", default=_ABSENT, metavar="FILE", help="UTF-8 text, cut into sequences"
    )
    group.add_argument(
        "--tokens",
        default=_ABSENT,
        metavar="FILE.npy",
        help="token ids (sequences, length) instead",
    )
    group.add_argument(
        "--length",
        type=int,
        default=_ABSENT,
        metavar="T",
        help="tokens per sequence (default: the model's, up to 2048)",
    )
    group.add_argument(
        "--sequences",
        type=int,
        default=_ABSENT,
        metavar="N",
        help="how many (default: up to 32 of a text, all of FILE.npy)",
    )
    group.add_argument(
        "--prefix",
        default=_ABSENT,
        metavar="WHAT",
        help="before each sequence of a text: auto (default: what the tokenizer adds by itself, "
        "for Pythia nothing), none, bos, or token ids",
    )
    group.add_argument(
        "--tokenizer",
        default=_ABSENT,
        metavar="PATH",
        help="tokenizer, if the model has none beside it",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say how to build the model."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model-config",
        default=_ABSENT,
        metavar="PATH",
        help="config.json or its folder, if it is not beside the weights",
    )
    group.add_argument(
        "--build",
        default=_ABSENT,
        metavar="MODULE:FUNCTION",
        help="your function that returns the torch.nn.Module, for models not from transformers",
    )
    group.add_argument(
        "--dtype",
        default=_ABSENT,
        help="float32 (default), bfloat16, float16, float64, auto (as stored)",
    )
    group.add_argument(
        "--device", default=_ABSENT, help="auto (default: cuda if there is one), cpu, cuda:1, mps"
    )
    group.add_argument("--attention", default=_ABSENT, help="sdpa (default) or eager")
    group.add_argument(
        "--trust-remote-code",
        action="store_true",
        default=_ABSENT,
        help="run code that comes with the model",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run ``entropy-monitor replay`` and return its exit code."""
    given = {k: v for k, v in vars(arguments).items() if k in OPTIONS}
    quiet = bool(vars(arguments).get("quiet", False))
    with one_line_errors("replay") as state:
        from entropy_monitor.replay.results import describe
        from entropy_monitor.replay.run import replay

        settings = settings_from(given)
        with progress(quiet) as (say, track):
            result = replay(settings, say=say, track=track)
        if result.summary:
            lines = describe(result.summary)
            write_lines(
                [
                    *lines,
                    f"results: {result.folder} (heads.csv, sinks.csv, replay.json, TensorBoard, "
                    f"report)",
                ]
            )
        elif result.outcomes and not any(o.status == "measured" for o in result.outcomes):
            write_lines([f"{o.name}: {o.status}: {o.reason}" for o in result.outcomes])
            raise ReplayError("no checkpoint could be measured.")
        state["code"] = result.exit_code
    return state["code"]


@contextmanager
def one_line_errors(command: str) -> Iterator[dict[str, int]]:
    """Turn what a person can mend into one line and exit code 2, and Ctrl-C into a word and 130."""
    state = {"code": 0}
    # the hub's own bars would write over ours
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        yield state
    except ReplayError as error:
        sys.stderr.write(f"entropy-monitor {command}: {error}\n")
        state["code"] = 2
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in {
            "transformers",
            "safetensors",
            "huggingface_hub",
            "yaml",
            "filelock",
            "matplotlib",
        }:
            raise
        sys.stderr.write(
            f"entropy-monitor {command} needs {missing}: pip install 'entropy-monitor[all]'.\n"
        )
        state["code"] = 2
    except KeyboardInterrupt:
        sys.stderr.write(
            f"entropy-monitor {command}: stopped; the same command goes on from here.\n"
        )
        state["code"] = 130


def write_lines(lines: list[str]) -> None:
    """Print lines."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


@contextmanager
def progress(quiet: bool) -> Iterator[tuple[Callable[[str], None], Callable[[int, int], None]]]:
    """Yield how to say a line and how to show progress: a bar on a terminal, lines elsewhere."""
    if quiet:
        yield (lambda line: None), (lambda done, total: None)
        return
    if not sys.stderr.isatty():
        yield (lambda line: write_lines([line])), (lambda done, total: None)
        return
    try:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
    except ImportError:
        yield (lambda line: write_lines([line])), (lambda done, total: None)
        return
    columns = (TextColumn("checkpoints"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("replay", total=None)

        def say(line: str) -> None:
            bar.console.print(line, markup=False, highlight=False)

        yield say, (lambda done, total: bar.update(task, completed=done, total=total))
