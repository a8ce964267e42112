"""``entropy-monitor audit``: arguments and glue."""

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entropy_monitor.replay import cli
from entropy_monitor.replay import options as options_of
from entropy_monitor.replay.errors import CheckpointError, ReplayError

DESCRIPTION = """\
How many conclusions about attention heads hang on keeping or dropping the sink?

  entropy-monitor audit EleutherAI/pythia-160m --text corpus.txt
  entropy-monitor audit ./my_model --text corpus.txt --length 512 --json

For random triples of heads (a, b, c): is b or c nearer to a? Says which share of the verdicts of
cosine, Jensen-Shannon and Euclid flip when the sink column is dropped, that none does for the
Aitchison distance of the content, how full-row distances vanish as the sink grows, and whether
clusters of heads agree (arXiv 2608.14712)."""

_ABSENT: Any = argparse.SUPPRESS
OPTIONS = (
    "model",
    "config",
    "revision",
    "out",
    "text",
    "tokens",
    "length",
    "sequences",
    "prefix",
    "tokenizer",
    "sink",
    "rows",
    "triples",
    "clusters",
    "heads",
    "seed",
    "model_config",
    "build",
    "dtype",
    "device",
    "attention",
    "trust_remote_code",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``audit``."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "model", nargs="?", default=_ABSENT, help="folder, weight file, or OWNER/NAME on the hub"
    )
    parser.add_argument(
        "--config", default=_ABSENT, metavar="FILE", help="YAML with any of these options"
    )
    parser.add_argument(
        "--revision",
        default=_ABSENT,
        help="name or step of the checkpoint (default: the last, or main)",
    )
    parser.add_argument(
        "--out", default=_ABSENT, metavar="DIR", help="where files go (default: audit-NAME)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    cli.add_sequence_arguments(parser)
    group = parser.add_argument_group("what is compared")
    group.add_argument(
        "--sink", default=_ABSENT, help="first (default) or key positions such as 0,-1"
    )
    for name, meaning in (
        ("rows", "rows per sequence (default: 16)"),
        ("triples", "random triples of heads (default: 2000)"),
        ("clusters", "clusters of heads (default: 8)"),
        ("heads", "most heads compared, a random choice of more (default: 400)"),
        ("seed", "of the random choices (default: 0)"),
    ):
        group.add_argument(f"--{name}", type=int, default=_ABSENT, metavar="N", help=meaning)
    cli.add_model_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run ``entropy-monitor audit`` and return its exit code."""
    given = {k: v for k, v in vars(arguments).items() if k in OPTIONS}
    as_json = bool(vars(arguments).get("json", False))
    with cli.one_line_errors("audit") as state:
        from entropy_monitor.replay.audit_output import describe, to_dict, write

        options = options_of.with_config_file(given, OPTIONS)
        with cli.progress(as_json) as (say, track):
            result, name = _audit(options, say, track)
        folder = Path(options.get("out") or f"audit-{name}")
        written = write(result, folder, title=name)
        if as_json:
            cli.write_lines([json.dumps(to_dict(result), indent=1)])
        else:
            cli.write_lines(
                [*describe(result), "", f"files: {', '.join(str(path) for path in written)}"]
            )
    return state["code"]


def _audit(options: Mapping[str, Any], say: Any, track: Any) -> tuple[Any, str]:
    from entropy_monitor.replay.audit import AuditSettings, audit_model
    from entropy_monitor.replay.models import load_model, read_config
    from entropy_monitor.replay.run import open_source, sequences_for
    from entropy_monitor.replay.settings import ReplaySettings

    if "model" not in options:
        raise ReplayError("say what to audit: a folder, or OWNER/NAME on the hub.")
    names = ("rows", "triples", "clusters", "heads", "seed")
    arguments: dict[str, Any] = {name: options[name] for name in names if name in options}
    if "sink" in options:
        arguments["sink"] = options_of.parse_sink(options["sink"])
    settings = AuditSettings(**arguments)
    # Verdicts need short sequences and few of them; the model's full length would only cost time.
    length = {} if "tokens" in options else {"length": 256}
    tokens = options_of.token_spec({**length, **options, "sequences": options.get("sequences")})
    scratch = tempfile.mkdtemp(prefix="entropy-monitor-audit-")
    try:
        request = ReplaySettings(
            model=options["model"],
            tokens=tokens,
            spec=options_of.model_spec(options),
            logdir=scratch,
            keep=True,
        )
        source = open_source(request)
        checkpoint = _checkpoint(source, options.get("revision"))
        try:
            say(f"fetching {source.label} {checkpoint.name}")
            path = source.fetch(checkpoint)
            shared = source.shared_file("config.json")
            plain = (
                request.spec.build is None
                and path.suffix != ".gguf"
                and not any(path.glob("*.gguf"))
            )
            config = read_config(path, request.spec, shared) if plain else None
            ids = sequences_for(source, request, config)
            loaded = load_model(path, request.spec, config=config)
        except CheckpointError as error:
            raise ReplayError(f"{checkpoint.name}: {error.reason}.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    ids = ids[: options.get("sequences") or 8]
    say(
        f"{len(ids)} sequences of {ids.shape[1]} tokens, {settings.rows} rows each, "
        f"{settings.triples} triples of heads"
    )
    track(0, len(ids))
    name = (
        Path(options["model"]).resolve().stem
        if Path(options["model"]).exists()
        else options["model"].split("/")[-1]
    )
    return audit_model(loaded, ids, settings, track=track), name


def _checkpoint(source: Any, revision: str | None) -> Any:
    from entropy_monitor.replay.checkpoints import Checkpoint

    if revision is None and source.remote:
        return Checkpoint(name="main", step=0, where="main")
    if revision is None:
        return source.checkpoints[-1]
    for checkpoint in source.checkpoints:
        if revision in (checkpoint.name, str(checkpoint.step)):
            return checkpoint
    if source.remote:  # any branch, tag or commit
        return Checkpoint(name=revision, step=0, where=revision)
    names = ", ".join(c.name for c in source.checkpoints[:6])
    raise ReplayError(
        f"{source.label} has no checkpoint {revision!r}; it has {names} ({len(source.checkpoints)} "
        f"in all)."
    )
