"""The demo: two small transformers whose attention entropy falls alike, for opposite reasons.

Needs ``pip install 'entropy-monitor[demo]'``; importing this package loads none of it.
"""

from entropy_monitor.demo.show import add_arguments, run

__all__ = ["add_arguments", "run"]
