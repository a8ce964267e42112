"""Nothing was measured: no attention call was seen, or no row counted. A warning."""

from entropy_monitor.alerts.view import Condition, View


def blind(view: View) -> Condition:
    """No head has a counted row, and none is non-finite (which would explain it)."""
    on = view.nothing()
    on[0] = not view.reading.measured.any() and not (view.reading.nonfinite > 0).any()
    return Condition(name="blind", on=on, keep=on, persist=0.0)
