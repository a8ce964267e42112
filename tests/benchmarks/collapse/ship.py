"""Writes `tests/data/alerts`: a few traces of the benchmark, small enough to travel with the tests.

python -m tests.benchmarks.collapse.ship FOLDER
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.collapse.__main__ import twin_name
from tests.benchmarks.collapse.judge import outcome
from tests.benchmarks.collapse.kinds import KINDS

SHIPPED = (
    "qk_growth",
    "rate_spike",
    "no_scale",
    "qk_growth_layer",
    "bag_deep",
    "cooling",
    "labels",
    "h_copy_rope",
    "h_window",
)
KEPT = (
    "sink_mass",
    "content_mass",
    "binary_entropy",
    "content_mass_entropy",
    "content_evenness",
    "total_entropy",
    "max_logit",
    "logit_spread_scaled",
    "support",
    "log_support",
)
TARGET = Path(__file__).parents[2] / "data" / "alerts"


def _load(path: Path) -> dict[str, Any]:
    with np.load(path) as data:
        return {name: data[name] for name in data.files}


def main() -> None:
    """Copies, in float16 where it fits, with what each run turned out to be."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.collapse.ship")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    TARGET.mkdir(parents=True, exist_ok=True)
    labels = {}
    for name in SHIPPED:
        run = KINDS[name]
        trace = _load(folder / f"{name}_s0.npz")
        twin = folder / f"{twin_name(run)}_s0.npz"
        group, damage = outcome(run.group, trace, _load(twin) if twin.exists() else None)
        fault = run.fault.step if run.fault else 0
        labels[name] = {"group": group, "fault_step": fault, "damage_step": damage}
        kept = {key: trace[key] for key in KEPT}
        small = {
            key: array.astype(np.float16 if np.abs(array).max() < 1e3 else np.float32)
            for key, array in kept.items()
        }
        np.savez_compressed(TARGET / f"{name}.npz", step=trace["step"], **small)
    (TARGET / "labels.json").write_text(json.dumps(labels, indent=1) + "\n")


if __name__ == "__main__":
    main()
