"""From the words of a command line or a YAML file to settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entropy_monitor.replay.errors import ReplayError

OPTIONS = (
    "model",
    "config",
    "logdir",
    "revisions",
    "baseline",
    "skip_duplicates",
    "text",
    "tokens",
    "length",
    "sequences",
    "prefix",
    "tokenizer",
    "rows",
    "sink",
    "model_config",
    "build",
    "dtype",
    "device",
    "attention",
    "trust_remote_code",
    "batch",
    "threads",
    "shard",
    "keep",
    "max_download_gb",
    "yes",
    "dry_run",
    "restart",
    "parquet",
)


def settings_from(given: Mapping[str, Any]) -> Any:
    """Build `ReplaySettings` from options; those of ``config`` first, the others over them.

    Raises:
        ReplayError: If an option does not exist or has a value that is not allowed.
    """
    from entropy_monitor.replay.settings import ReplaySettings

    options = with_config_file(given, OPTIONS)
    if "model" not in options:
        raise ReplayError("say what to replay: a folder, or OWNER/NAME on the hub.")
    plain = (
        "model",
        "logdir",
        "revisions",
        "baseline",
        "batch",
        "threads",
        "keep",
        "yes",
        "dry_run",
        "restart",
        "skip_duplicates",
        "parquet",
        "max_download_gb",
    )
    arguments: dict[str, Any] = {name: options[name] for name in plain if name in options}
    if isinstance(arguments.get("revisions"), (list, int)):  # YAML needs no commas
        values = arguments["revisions"]
        arguments["revisions"] = (
            ",".join(map(str, values)) if isinstance(values, list) else str(values)
        )
    if "max_download_gb" in arguments:
        arguments["max_download_gb"] = float(arguments["max_download_gb"])
    if "rows" in options:
        arguments["rows"] = parse_rows(options["rows"])
    if "sink" in options:
        arguments["sink"] = parse_sink(options["sink"])
    if "shard" in options:
        arguments["shard"] = parse_shard(options["shard"])
    return ReplaySettings(tokens=token_spec(options), spec=model_spec(options), **arguments)


def with_config_file(given: Mapping[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """Return options, those of a YAML file below those that were given.

    Raises:
        ReplayError: If the file cannot be read or holds an unknown option.
    """
    options = dict(given)
    name = options.pop("config", None)
    if name is None:
        return options
    import yaml

    try:
        content = yaml.safe_load(Path(name).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        first = str(error).splitlines()[0]
        raise ReplayError(f"`--config {name}` cannot be read ({first}).") from error
    if not isinstance(content, dict):
        raise ReplayError(
            f"`--config {name}` must hold options by name; got a {type(content).__name__}."
        )
    unknown = [key for key in content if key not in known or key == "config"]
    if unknown:
        raise ReplayError(
            f"`--config {name}`: no option {unknown[0]!r}; there are {', '.join(known)}."
        )
    return {**content, **options}


def token_spec(options: Mapping[str, Any]) -> Any:
    """Build the `TokenSpec`."""
    from entropy_monitor.replay.tokens import TokenSpec

    names = ("text", "tokens", "length", "sequences", "prefix", "tokenizer")
    return TokenSpec(**{name: options[name] for name in names if name in options})


def model_spec(options: Mapping[str, Any]) -> Any:
    """Build the `ModelSpec`; ``auto`` becomes the device there is."""
    import torch

    from entropy_monitor.replay.models import ModelSpec

    names = ("build", "dtype", "attention", "trust_remote_code")
    arguments = {name: options[name] for name in names if name in options}
    device = options.get("device", "auto")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.device(device)
    except RuntimeError:
        raise ReplayError(
            f"`--device` must be auto, cpu, cuda, cuda:N or mps; got {device!r}."
        ) from None
    return ModelSpec(config=options.get("model_config"), device=device, **arguments)


def parse_rows(value: Any) -> int | None:
    """Return the number of rows, None for all.

    Raises:
        ReplayError: If it is neither.

    Example:
        >>> parse_rows("all"), parse_rows("64")
        (None, 64)
    """
    if value is None or value == "all":
        return None
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ReplayError(f"`--rows` must be a number or all; got {value!r}.") from None


def parse_sink(value: Any) -> Any:
    """Return a sink as `AttentionMonitor` takes it.

    Raises:
        ReplayError: If it is none.

    Example:
        >>> parse_sink("first"), parse_sink("0,-1"), parse_sink("tokens:101,102")
        ('first', (0, -1), {'token_ids': [101, 102]})
    """
    if value in ("first", "none", "learned", "auto"):
        return value
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    ids = text.removeprefix("tokens:")
    try:
        numbers = [int(piece) for piece in ids.split(",")]
    except ValueError:
        raise ReplayError(
            f"`--sink` must be first, auto, learned, none, positions such as 0,-1 or tokens:ID,ID; "
            f"got {text!r}."
        ) from None
    return {"token_ids": numbers} if ids != text else tuple(numbers)


def parse_shard(value: str) -> tuple[int, int]:
    """Return ``(i, n)`` of ``"i/n"``.

    Raises:
        ReplayError: If it is not of that form.
    """
    first, slash, second = str(value).partition("/")
    if not slash or not first.isdigit() or not second.isdigit():
        raise ReplayError(f"`--shard` must be I/N such as 0/4; got {value!r}.")
    return int(first), int(second)
