"""``entropy-monitor COMMAND``: only the module of the chosen command is loaded."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from entropy_monitor import __version__

COMMANDS = {
    "demo": ("entropy_monitor.demo", "train two tiny models and see why entropy fell, in a minute"),
    "report": ("entropy_monitor.report.command", "what a run says: text, JSON, CSV, PNG, HTML"),
    "scan": ("entropy_monitor.report.scan", "run the alerts over a recorded run"),
    "replay": ("entropy_monitor.replay.cli", "measure a series of checkpoints"),
    "audit": ("entropy_monitor.replay.audit_cli", "do verdicts about heads hang on the sink?"),
    "doctor": ("entropy_monitor.doctor", "which attention of a model is seen, and which is not"),
}
"""Name: (module with `add_arguments` and `run`, one line of help)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console script.

    Args:
        argv: Arguments without the program's name; those of the process by default.

    Returns:
        The exit code: 0 done, 1 done but not clean, 2 bad input, 130 stopped with Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="entropy-monitor",
        description="Sink mass and content entropy of attention, apart: why did entropy change?",
        epilog="entropy-monitor COMMAND --help tells more about a command.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    # Help lists all commands, but a command's module costs seconds (torch) and may need an extra.
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    module = None
    for name, (home, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name == chosen:
            module = importlib.import_module(home)
            module.add_arguments(command)
    try:
        namespace = parser.parse_args(arguments)
        assert module is not None
        code = int(module.run(namespace))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        return 130
    except BrokenPipeError:  # `| head` has seen enough; nothing may be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
