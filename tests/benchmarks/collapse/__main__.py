"""Trains, judges, prints the tables."""

import argparse
import hashlib
import platform
import time
from pathlib import Path

import numpy as np

from entropy_monitor.alerts import Alert, scan
from tests.benchmarks.collapse.detectors import DETECTORS
from tests.benchmarks.collapse.judge import Verdict, outcome, verdict
from tests.benchmarks.collapse.kinds import KINDS, Run
from tests.benchmarks.collapse.table import table

STATS_LEFT_OUT = ("step", "loss_step", "loss", "val_loss", "grad_norm")


def twin_name(run: Run) -> str:
    """Twins that are the same run are trained once."""
    return "twin_" + hashlib.sha256(repr(run.twin()).encode()).hexdigest()[:10]


def alerts_of(trace: dict[str, np.ndarray], policy: str | None) -> list[Alert]:
    """The alerts of a trace under a policy."""
    return scan(
        trace["step"],
        {key: value for key, value in trace.items() if key not in STATS_LEFT_OUT},
        policy,
    )


def main() -> None:
    """See the package's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.collapse", description=main.__doc__
    )
    parser.add_argument("--only", default="", help="kinds whose name begins so")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--folder", type=Path, default=Path("build/collapse"), help="where traces are kept"
    )
    parser.add_argument("--judge", action="store_true", help="train nothing, judge what is there")
    parser.add_argument("--policy", nargs="*", default=["default", "strict", "quiet"])
    options = parser.parse_args()
    kinds = {name: run for name, run in KINDS.items() if name.startswith(options.only)}
    print(
        f"{platform.processor() or platform.machine()}, {len(kinds)} kinds, {options.seeds} seed(s)"
    )
    traces = {}
    for seed in range(options.seeds):
        for name, run in kinds.items():
            twin = None
            if run.group != "healthy" and run.group != "sink":
                twin = _trace(twin_name(run), run.twin(), seed, options)
            trace = _trace(name, run, seed, options)
            if trace is not None:
                traces[f"{name}_s{seed}"] = (run, trace, twin)
    rows: dict[str, list[Verdict]] = {}
    for policy in options.policy:
        rows[f"entropy_monitor, {policy}"] = [
            _judge(name, run, trace, twin, alerts_of(trace, policy))
            for name, (run, trace, twin) in traces.items()
        ]
    for label, detector in DETECTORS.items():
        rows[label] = [
            _judge(
                name,
                run,
                trace,
                twin,
                [Alert("concentration", "warn", "model", step) for step in detector(trace)],
            )
            for name, (run, trace, twin) in traces.items()
        ]
    first = next(iter(rows.values()))
    for item in first:
        print(
            f"{item.name:22} {item.group:10} damage {item.damage!s:5} alarm {item.alarm!s:5} "
            f"lead {item.lead!s:5} {', '.join(item.kinds)}"
        )
    print()
    print(table(rows))


def _trace(
    name: str, run: Run, seed: int, options: argparse.Namespace
) -> dict[str, np.ndarray] | None:
    path = options.folder / f"{name}_s{seed}.npz"
    if options.judge and not path.exists():
        return None
    from tests.benchmarks.collapse.train import trace_of

    start = time.perf_counter()
    known = path.exists()
    trace = trace_of(name, run, seed, options.folder)
    if not known:
        print(f"trained {name}_s{seed} in {time.perf_counter() - start:.0f} s", flush=True)
    return trace


def _judge(
    name: str,
    run: Run,
    trace: dict[str, np.ndarray],
    twin: dict[str, np.ndarray] | None,
    alerts: list[Alert],
) -> Verdict:
    group, damage = outcome(run.group, trace, twin)
    return verdict(name, group, run.fault.step if run.fault else 0, damage, alerts)


if __name__ == "__main__":
    main()
