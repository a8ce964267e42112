"""The policies that have a name.

`configs/alerts/*.yaml` are the same values as files to copy and edit; a test keeps them equal.
"""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    # Earlier, with some false alarms: bounds nearer to what healthy heads do, one record is enough.
    "strict": {
        "warmup": 100.0,
        "persist": 10.0,
        "concentration": {
            "evenness_model": 0.42,
            "evenness_layer": 0.32,
            "evenness_head": 0.2,
            "spread_model": 2.0,
            "spread_layer": 3.0,
            "spread_head": 5.0,
            "drop": 0.6,
            "drop_below": 0.5,
        },
        "logit_growth": {
            "factor": 2.0,
            "spread_model": 1.1,
            "evenness_model": 0.6,
            "spread_layer": 2.0,
            "evenness_layer": 0.5,
        },
    },
    # Only what calls for action: alarms of many heads that last, no notes, no single head.
    "quiet": {
        "report": "warn",
        "persist": 50.0,
        "concentration": {
            "evenness_model": 0.25,
            "evenness_layer": 0.15,
            "evenness_head": 0.0,
            "spread_model": 4.0,
            "spread_layer": 8.0,
            "drop": 0.35,
            "drop_below": 0.25,
            "drop_spread": 2.0,
        },
        "logit_growth": {"enabled": False},
    },
}
