"""TensorBoard's "Attention" tab.

The entry point that TensorBoard imports at every start, whether or not a run has our data, so it
imports nothing but TensorBoard's own base class: no torch, no numpy. An error while the rest loads
is logged and the tab left out, because an exception here would stop TensorBoard for the user.
"""

import argparse
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.base_plugin import TBLoader as _Loader
else:
    try:
        from tensorboard.plugins.base_plugin import TBLoader as _Loader
    except (
        ImportError
    ):  # the one-file report uses the answers below this package without TensorBoard
        _Loader = object

PLUGIN_NAME = "entropy_monitor"
"""The name in summary metadata, in routes and in TensorBoard's hash."""

SAMPLES = 1000
"""Steps kept per run unless the user says otherwise; TensorBoard itself keeps 100 or 10 tensors."""

logger = logging.getLogger(__name__)


class EntropyMonitorLoader(_Loader):  # type: ignore[misc]  # TensorBoard is untyped
    """Loads the tab, or steps aside."""

    def fix_flags(self, flags: argparse.Namespace) -> None:
        """Keep as many steps of our tensors as of scalars, under both of TensorBoard's loaders.

        Args:
            flags: TensorBoard's flags; what the user set stays.
        """
        samples = getattr(flags, "samples_per_plugin", None)
        if isinstance(samples, dict):
            samples.setdefault(PLUGIN_NAME, SAMPLES)

    def load(self, context: "TBContext") -> Any:
        """Return the plugin, or None with a warning if anything about it is broken.

        Args:
            context: What TensorBoard hands to every plugin.
        """
        try:
            from entropy_monitor.tensorboard_plugin.plugin import AttentionPlugin

            return AttentionPlugin(context)
        except Exception as error:
            # Anything at all: a half-upgraded installation must not take TensorBoard down with it.
            logger.warning("The Attention tab is left out: %s: %s", type(error).__name__, error)
            return None
