"""The policies that have a name.

`configs/alerts/*.yaml` are the same values as files to copy and edit.
"""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "strict": {},
    "quiet": {},
}
