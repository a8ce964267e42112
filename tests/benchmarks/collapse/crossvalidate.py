"""Are the thresholds fitted to the kinds they were chosen on? Choose without a kind, judge on it.

    python -m tests.benchmarks.collapse.crossvalidate FOLDER

FOLDER holds traces and `labels.json` ({name: {group, fault_step, damage_step}}; the kind is the
name without its seed). For every kind a candidate is chosen on all other kinds: fewest errors (a
false alarm counts as two misses), then the longest median lead. With it the left-out kind is
judged.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from entropy_monitor.alerts import AlertPolicy, scan
from tests.benchmarks.collapse.judge import FOUND_KINDS

SILENT = ("NEG", "SINK", "BOTH", "DIL", "DMG")
NOTES_OFF = {name: {"enabled": False} for name in ("sink_growth", "dilution", "dormant")}


def candidates() -> dict[str, dict[str, Any]]:
    """The default and its neighbours: every threshold family moved by about a fifth, both ways."""
    base = AlertPolicy()
    rule, growth = base.concentration, base.logit_growth

    def spread(by: float) -> dict[str, Any]:
        return {
            "concentration": {
                name: by * getattr(rule, name)
                for name in ("spread_model", "spread_layer", "spread_head")
            },
            "logit_growth": {
                name: by * getattr(growth, name) for name in ("spread_model", "spread_layer")
            },
        }

    def evenness(by: float) -> dict[str, Any]:
        return {
            "concentration": {
                name: by * getattr(rule, name)
                for name in ("evenness_model", "evenness_layer", "evenness_head", "drop_below")
            },
            "logit_growth": {
                name: by * getattr(growth, name) for name in ("evenness_model", "evenness_layer")
            },
        }

    def waste(by: float) -> dict[str, Any]:
        names = ("waste_model", "waste_layer", "waste_head")
        return {"concentration": {name: by * getattr(rule, name) for name in names}}

    return {
        "default": {},
        "spread x .8": spread(0.8),
        "spread x 1.25": spread(1.25),
        "evenness x .85": evenness(0.85),
        "evenness x 1.15": evenness(1.15),
        "waste x .8": waste(0.8),
        "waste x 1.25": waste(1.25),
        "growth x 2": {"logit_growth": {"factor": 2.0}},
        "growth x 3": {"logit_growth": {"factor": 3.0}},
        "persist 0": {"persist": 0.0},
        "persist 20": {"persist": 20.0},
    }


@dataclass(frozen=True)
class Score:
    """One run under one candidate."""

    false: bool
    found: bool | None  # None where there is nothing to find
    lead: int | None


def judge(label: dict[str, Any], alarms: list[Any]) -> Score:
    """As ALERTS are judged: an alarm in a silent group or before the fault is false."""
    fault = label.get("fault_step") or 0
    if label["group"] in SILENT:
        return Score(bool(alarms), None, None)
    after = [alarm.step for alarm in alarms if alarm.step >= fault and alarm.kind in FOUND_KINDS]
    early = any(alarm.step < fault for alarm in alarms)
    if label["group"] != "POS":
        return Score(early, None, None)
    return Score(early, bool(after), label["damage_step"] - after[0] if after else None)


def summary(scores: Iterable[Score]) -> tuple[int, int, int, float, float]:
    """Found, to find, false, median lead, share of leads that are not negative."""
    scores = list(scores)
    hits = [score for score in scores if score.found is not None]
    leads = [score.lead for score in hits if score.lead is not None]
    return (
        sum(bool(score.found) for score in hits),
        len(hits),
        sum(score.false for score in scores),
        float(np.median(leads)) if leads else float("nan"),
        float(np.mean(np.array(leads) >= 0)) if leads else float("nan"),
    )


def main() -> None:
    """Prints the fitted and the left-out table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.collapse.crossvalidate")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    labels = json.loads((folder / "labels.json").read_text())
    scores: dict[str, dict[str, Score]] = {}
    for candidate, changes in candidates().items():
        policy = AlertPolicy.from_dict({**NOTES_OFF, **changes})
        scores[candidate] = {}
        for name, label in labels.items():
            with np.load(folder / f"{name}.npz") as data:
                history = {key: data[key] for key in data.files if data[key].ndim == 3}
                steps = data["step"]
            scores[candidate][name] = judge(
                label, [alert for alert in scan(steps, history, policy) if alert.is_alarm]
            )
        found, total, false, lead, positive = summary(scores[candidate].values())
        print(
            f"| {candidate} | {found}/{total} | {false} | {lead:.0f} | {positive:.0%} |", flush=True
        )

    kinds = defaultdict(list)
    for name in labels:
        kinds[name.rsplit("_s", 1)[0]].append(name)
    left_out, chosen = {}, Counter()
    for members in kinds.values():

        def merit(candidate: str, without: list[str] = members) -> tuple[float, float]:
            rest = [score for name, score in scores[candidate].items() if name not in without]
            found, total, false, lead, _ = summary(rest)
            return (-(total - found) - 2 * false, lead)

        best = max(scores, key=merit)
        chosen[best] += 1
        left_out |= {name: scores[best][name] for name in members}
    found, total, false, lead, positive = summary(left_out.values())
    print(f"| every kind left out once | {found}/{total} | {false} | {lead:.0f} | {positive:.0%} |")
    print("chosen:", dict(chosen))


if __name__ == "__main__":
    main()
