"""``entropy-monitor scan``: run the alerts, with any policy, over a run that was recorded."""

import argparse
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence

from entropy_monitor.alerts import SEVERITIES, Alert, AlertPolicy, scan
from entropy_monitor.writers.record_reader import Run, read_run

DESCRIPTION = """\
Run the alerts over a recorded run: the code that runs in training, with the policy you choose.

  entropy-monitor scan runs/gpt
  entropy-monitor scan runs/gpt --policy strict --json
  entropy-monitor scan runs/gpt --policy alerts.toml --fail-on warn"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``scan``."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", help="folder of the run, or a parent with exactly one")
    parser.add_argument(
        "--policy",
        default="default",
        help="default, strict, quiet, or a TOML or YAML file (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one list of alerts")
    parser.add_argument(
        "--fail-on",
        choices=SEVERITIES,
        help="exit with 1 if there is an alert of this severity or a worse one",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    try:
        policy = AlertPolicy.load(args.policy)
        recorded = read_run(args.run)
        recorded.require_steps()
        alerts = scan_run(recorded, policy)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"entropy-monitor scan: {error}\n")
        return 2
    if args.json:
        sys.stdout.write(json.dumps([alert.to_dict() for alert in alerts], indent=1) + "\n")
    else:
        sys.stdout.write(describe(recorded, alerts, args.policy))
    if args.fail_on is None:
        return 0
    bad = SEVERITIES[SEVERITIES.index(args.fail_on) :]
    return int(any(alert.severity in bad for alert in alerts))


def scan_run(recorded: Run, policy: AlertPolicy | str | None = None) -> list[Alert]:
    """Return the alerts that a policy raises over a recorded run."""
    layers = [name for name, _ in recorded.layers]
    return scan(recorded.steps, recorded.history(), policy, layers=layers)


def describe(recorded: Run, alerts: Sequence[Alert], policy: str) -> str:
    """Return alerts as text."""
    first, last = int(recorded.steps[0]), int(recorded.steps[-1])
    head = f"{recorded.path}: steps {first} to {last}, {len(recorded)} recorded, policy {policy}"
    if not alerts:
        return f"{head}\nno alerts\n"
    counts = Counter[str](alert.severity for alert in alerts)
    lines = [head, ", ".join(f"{counts[s]} {s}" for s in SEVERITIES[::-1] if counts[s])]
    for alert in alerts:
        lines += ["", f"step {alert.step}  {alert.severity.upper()}  {alert.kind}, {alert.place}"]
        lines += textwrap.wrap(alert.message, 96, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines) + "\n"
