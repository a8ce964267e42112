"""Of the fall of attention entropy in Pythia's training, how much was the sink?

Papamichalis and Ruane (arXiv 2608.14712) report that the sink explains 30 % of the fall at 70M
parameters, 95 % at 1B and 79 % at 1.4B. Whoever can reach the hub can check it; the text is any
file of a few thousand words:

    python examples/pythia_replay.py --text corpus.txt     # 70m: 26 GB in all, 0.35 GB at once
    python examples/pythia_replay.py --text corpus.txt --sizes 70m 1b 1.4b --revisions log

A stopped run goes on with the same command. Each size leaves a run for TensorBoard and
`entropy-monitor report`.
"""

import argparse
from pathlib import Path

from entropy_monitor.replay import ReplayResult, replay
from entropy_monitor.replay.options import settings_from

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "replay"
PAPER = {"70m": 0.30, "1b": 0.95, "1.4b": 0.79}


def run(size: str, options: dict[str, object]) -> ReplayResult:
    """Replay one size."""
    print(f"pythia-{size}")
    settings = settings_from({"config": str(CONFIGS / f"pythia-{size}.yaml"), **options})
    return replay(settings, say=lambda line: print(f"  {line}"))


def share(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = sorted(path.stem.removeprefix("pythia-") for path in CONFIGS.glob("pythia-*.yaml"))
    parser.add_argument("--sizes", nargs="+", choices=sizes, default=["70m"])
    for name in ("text", "tokens", "revisions", "logdir"):
        parser.add_argument(f"--{name}")
    for name in ("length", "sequences", "threads"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--yes", action="store_true", help="download whatever it takes")
    arguments = vars(parser.parse_args())
    chosen = arguments.pop("sizes")
    logdir = Path(arguments.pop("logdir") or "runs")
    options = {name: value for name, value in arguments.items() if value}
    results = {
        size: run(size, {**options, "logdir": str(logdir / f"pythia-{size}")}) for size in chosen
    }
    print(f"\n{'':8}{'entropy':>10}{'sink':>10}{'content':>10}{'sink share':>12}{'paper':>8}")
    for size, result in results.items():
        if not result.summary:
            print(f"{size:8}  not finished")
            continue
        change = result.summary["change"]
        columns = "".join(f"{change[name]:>10.3f}" for name in ("total", "sink", "content"))
        paper = f"{PAPER[size]:.0%}" if size in PAPER else ""
        print(f"{size:8}{columns}{share(result.summary['sink_share']):>12}{paper:>8}")


if __name__ == "__main__":
    main()
