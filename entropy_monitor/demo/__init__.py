"""The demo: two small transformers whose attention entropy falls alike, for opposite reasons.

Needs ``pip install 'entropy-monitor[demo]'``; importing this package loads none of it.
"""

from entropy_monitor.demo.show import HELP, add_arguments, run

__all__ = ["HELP", "add_arguments", "run"]
