"""Verdicts as a table."""

from collections.abc import Mapping, Sequence

import numpy as np

from tests.benchmarks.collapse.judge import Verdict

GROUPS = ("healthy", "sink", "dilution", "elsewhere")


def table(rows: Mapping[str, Sequence[Verdict]]) -> str:
    """One line per detector: found, alarms by group, alarms before the fault, lead."""
    head = ["detector", "found", *GROUPS, "before fault", "median lead", "lead >= 0"]
    lines = [head, ["---"] * len(head)]
    for label, verdicts in rows.items():
        hits = [item for item in verdicts if item.group == "collapse"]
        found = [item for item in hits if item.alarm is not None]
        leads = [item.lead for item in found if item.lead is not None]
        cells = [label, f"{len(found)}/{len(hits)}"]
        for group in GROUPS:
            members = [item for item in verdicts if item.group == group]
            cells.append(
                f"{sum(item.alarm is not None or item.early for item in members)}/{len(members)}"
            )
        faulty = [item for item in verdicts if item.fault > 0]
        cells.append(f"{sum(item.early for item in faulty)}/{len(faulty)}")
        cells += (
            [f"{np.median(leads):.0f}", f"{np.mean([lead >= 0 for lead in leads]):.0%}"]
            if leads
            else ["-", "-"]
        )
        lines.append(cells)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
