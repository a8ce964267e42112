"""Alerts one can trust: true collapse, early, with its cause; silence otherwise.

numpy only, no torch.

    from entropy_monitor.alerts import scan
    for alert in scan(steps, history):
        print(alert.message)

`AlertEngine` is the same thing record by record, `AlertPolicy` says what counts, `actions` what to
do about it.
"""

from entropy_monitor.alerts.alert import KINDS, LEVELS, SEVERITIES, Alert
from entropy_monitor.alerts.engine import AlertEngine
from entropy_monitor.alerts.offline import scan
from entropy_monitor.alerts.policy import AlertPolicy

__all__ = ["KINDS", "LEVELS", "SEVERITIES", "Alert", "AlertEngine", "AlertPolicy", "scan"]
