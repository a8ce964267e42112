"""``entropy-monitor doctor``: one forward pass on random tokens says what the monitor sees.

Nothing is downloaded and no weights are needed: a model is built from its configuration with random
weights, only as deep as asked for. The table names every attention layer, the way in which it was
seen, its heads, its mask, and how many of its rows count; below it stands what was not seen and
why.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from entropy_monitor.calls import AttentionCall, RowKind
from entropy_monitor.capture import CaptureReport, CaptureSession
from entropy_monitor.names import ROW_KINDS
from entropy_monitor.statistics import measure_call

MOST_PARAMETERS = 2_000_000_000
"""Larger models are built with fewer layers, or not at all."""


class DoctorError(ValueError):
    """What a person can mend: no such model, a configuration that cannot be built."""


@dataclass(frozen=True, kw_only=True)
class SeenLayer:
    """One line of the table.

    Attributes:
        name: Qualified name of the module that owns the attention; ``name#1`` for its second call.
        way: How it was seen.
        heads: Query heads.
        key_heads: Key heads, fewer with grouped queries; None where only logits were seen.
        queries: Queries of a sequence.
        keys: Keys of a sequence.
        mask: Kind of the mask.
        sink_mass: Mean sink mass over the rows that see a sink; None if none does.
        rows: Rows of each kind.
    """

    name: str
    way: str
    heads: int
    key_heads: int | None
    queries: int
    keys: int
    mask: str
    sink_mass: float | None
    rows: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the monitor sees of a model.

    Attributes:
        model: Class of the model.
        parameters: Number of its parameters.
        layers: One entry per attention call, in order.
        report: What was seen and what was not, as the capture says it.
    """

    model: str
    parameters: int
    layers: tuple[SeenLayer, ...]
    report: CaptureReport

    @property
    def healthy(self) -> bool:
        """All attention that ran was seen."""
        return self.report.complete

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "layers": [asdict(layer) for layer in self.layers],
            "unseen": self.report.unseen,
            "opaque": self.report.opaque,
            "lost": self.report.lost,
            "idle": list(self.report.idle),
            "healthy": self.healthy,
            "summary": self.report.describe(),
        }

    def to_text(self) -> str:
        """The table and what was not seen, for a terminal."""
        lines = [f"{self.model}, {self.parameters:,} parameters"]
        if self.layers:
            width = max(len("layer"), *(len(layer.name) for layer in self.layers))
            lines.append("")
            lines.append(
                f"{'layer':{width}}  {'seen by':9}  {'heads':>7}  {'queries x keys':>14}  "
                f"{'mask':24}  {'sink':>6}  rows"
            )
            for one in self.layers:
                grouped = one.key_heads is not None and one.key_heads != one.heads
                heads = f"{one.heads}/{one.key_heads}" if grouped else str(one.heads)
                sink = "none" if one.sink_mass is None else f"{one.sink_mass:.3f}"
                rows = ", ".join(f"{count} {kind}" for kind, count in one.rows.items() if count)
                size = f"{one.queries} x {one.keys}"
                lines.append(
                    f"{one.name:{width}}  {one.way:9}  {heads:>7}  {size:>14}  {one.mask:24}  "
                    f"{sink:>6}  {rows}"
                )
        lines += ["", self.report.describe()]
        if self.report.idle and self.layers:
            lines.append(f"Did not run: {', '.join(self.report.idle)}.")
        return "\n".join(lines)


def diagnose(
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    *,
    sink: Any = "first",
    attention_modules: str | None = None,
) -> Diagnosis:
    """Run a model once and say what the monitor sees of its attention.

    Args:
        model: The model.
        run: Runs its forward pass.
        sink: Which keys are the sink, see `row_statistics`.
        attention_modules: Shell pattern of class names of attention modules that are not named so.

    Returns:
        The diagnosis.
    """
    layers: dict[str, SeenLayer] = {}
    session = CaptureSession(model, candidates=attention_modules)

    def note(call: AttentionCall) -> None:
        rows = measure_call(call, sink=sink)
        seeing = rows.kind == RowKind.VALID
        layers[call.name] = SeenLayer(
            name=call.name,
            way="?",
            heads=call.shape[1],
            key_heads=None if call.key is None else call.key.shape[1],
            queries=call.shape[2],
            keys=call.shape[3],
            mask=_mask_kind(call),
            sink_mass=float(rows.sink_mass[seeing].mean()) if bool(seeing.any()) else None,
            rows={kind: int((rows.kind == number).sum()) for number, kind in enumerate(ROW_KINDS)},
        )

    # With gradient, as in training: without, torch's own layers take an inference-only path.
    with torch.enable_grad(), session.window(note) as report:
        run(model)
    return Diagnosis(
        model=type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        layers=tuple(
            SeenLayer(**{**vars(layer), "way": report.way.get(name, "?")})
            for name, layer in layers.items()
        ),
        report=report,
    )


def _mask_kind(call: AttentionCall) -> str:
    if call.logits is not None:
        kind = "in the logits"
    elif call.mask is None:
        kind = "causal" if call.is_causal else "none"
    else:
        heads = (
            "per head" if call.mask.ndim > 1 and call.mask.shape[-3:-2] not in ((), (1,)) else ""
        )
        kind = " ".join(["bool" if call.mask.dtype == torch.bool else "additive", heads]).strip()
        kind += " + causal" if call.is_causal else ""
    if call.window is not None:
        kind += f", window {call.window}"
    if call.softcap is not None:
        kind += f", soft-cap {call.softcap:g}"
    if call.sink_logits is not None or call.virtual_columns:
        kind += ", learned sink"
    return kind


# Building a model from what a person names -----------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``entropy-monitor doctor``."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "model",
        metavar="MODEL_OR_CONFIG",
        help="a folder with config.json, a config.json, the name of a transformers model type "
        "(gpt2, llama, ...), or package.module:function that returns a model, or a model and "
        "its inputs (a tensor, a tuple, or a dictionary)",
    )
    parser.add_argument("--attention", help="attention implementation: sdpa, eager, flex_attention")
    parser.add_argument("--layers", type=int, help="build at most this many layers")
    parser.add_argument("--batch", type=int, default=2, help="sequences (default: %(default)s)")
    parser.add_argument("--length", type=int, default=32, help="tokens (default: %(default)s)")
    parser.add_argument(
        "--padding", choices=("none", "left", "right"), default="none", help="pad one sequence"
    )
    parser.add_argument(
        "--sink", default="first", help="first, none, learned, or a key position (default: first)"
    )
    parser.add_argument("--attention-modules", help="class names of attention not named so")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run ``entropy-monitor doctor``; 0 if all attention was seen, 1 if not, 2 on bad input."""
    try:
        sink = arguments.sink if not arguments.sink.lstrip("-").isdigit() else int(arguments.sink)
        if arguments.batch < 1 or arguments.length < 1:
            raise DoctorError("--batch and --length must be at least 1.")
        model, feed = build(arguments)
        diagnosis = diagnose(model, feed, sink=sink, attention_modules=arguments.attention_modules)
        if diagnosis.report.errors:
            error = diagnosis.report.errors[0]
            raise DoctorError(str(error)) from error
    except DoctorError as error:
        sys.stderr.write(f"entropy-monitor doctor: {error}\n")
        return 2
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        sys.stderr.write("entropy-monitor doctor needs transformers: pip install transformers\n")
        return 2
    shown = json.dumps(diagnosis.to_dict(), indent=2) if arguments.json else diagnosis.to_text()
    sys.stdout.write(f"{shown}\n")
    return 0 if diagnosis.healthy else 1


def build(arguments: argparse.Namespace) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    """The model that a person named, and how to run it.

    Raises:
        DoctorError: If it cannot be found, built or run.
    """
    if ":" in arguments.model and not Path(arguments.model).exists():
        return _from_function(arguments.model)
    config = _read_config(arguments)
    if arguments.layers is not None:
        _shorten(config, arguments.layers)
    import transformers
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    named = [
        getattr(transformers, name)
        for name in getattr(config, "architectures", None) or ()
        if hasattr(transformers, name)
    ]
    auto = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
    options = {"attn_implementation": arguments.attention} if arguments.attention else {}
    make = named[0]._from_config if named else auto.from_config
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in make(config, **options).parameters())
        if size > MOST_PARAMETERS:
            raise DoctorError(
                f"the model has {size:,} parameters, more than is built here; "
                "--layers 2 builds the first two layers alone."
            )
        model = make(config, **options).eval()
    except DoctorError:
        raise
    except Exception as error:
        raise DoctorError(f"transformers cannot build the model: {_line(error)}") from error
    inputs = _inputs(config, model, arguments)
    return model, lambda ready: ready(**inputs)


def _from_function(name: str) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    home, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(home), function)()
    except (ImportError, AttributeError) as error:
        raise DoctorError(f"{name} cannot be loaded: {_line(error)}") from error
    finally:
        sys.path.pop(0)
    model, inputs = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise DoctorError(f"{name} must return a torch.nn.Module; got {type(model).__name__}.")
    if inputs is None:
        raise DoctorError(f"{name} must return the model and its inputs; got the model alone.")
    if isinstance(inputs, dict):
        return model.eval(), lambda ready: ready(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model.eval(), lambda ready: ready(*inputs)
    return model.eval(), lambda ready: ready(inputs)


def _read_config(arguments: argparse.Namespace) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    where = Path(arguments.model)
    if where.is_dir() and not (where / "config.json").is_file():
        raise DoctorError(f"{where} has no config.json.")
    try:
        if where.exists():
            return AutoConfig.from_pretrained(str(where))
        if arguments.model in CONFIG_MAPPING:
            return AutoConfig.for_model(arguments.model)
    except Exception as error:
        raise DoctorError(f"transformers cannot read {where}: {_line(error)}") from error
    raise DoctorError(
        f"{arguments.model} must be a folder or file with a configuration, a model type of "
        "transformers, or package.module:function; there is no such thing."
    )


def _shorten(config: Any, layers: int) -> None:
    if layers < 1:
        raise DoctorError(f"--layers must be at least 1; got {layers}.")
    for part in (config, *(getattr(config, n, None) for n in ("text_config", "vision_config"))):
        for name in ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers"):
            depth = getattr(part, name, None)
            if isinstance(depth, int):
                setattr(part, name, min(depth, layers))
        kinds = getattr(part, "layer_types", None)
        if isinstance(kinds, list):
            with suppress(AttributeError):  # made from the depth, as Mamba's is
                part.layer_types = kinds[:layers]


def _inputs(config: Any, model: nn.Module, arguments: argparse.Namespace) -> dict[str, Any]:
    """Random inputs of the kinds that the model's forward takes."""
    generator = torch.Generator().manual_seed(0)
    batch, length = arguments.batch, arguments.length
    text = getattr(config, "text_config", config)
    vocabulary = getattr(text, "vocab_size", None)

    def tokens() -> Tensor:
        if not isinstance(vocabulary, int):
            raise DoctorError("the configuration has no vocab_size to draw tokens from.")
        return torch.randint(vocabulary, (batch, length), generator=generator)

    main = getattr(model, "main_input_name", "input_ids")
    inputs: dict[str, Any] = {}
    vision = getattr(config, "vision_config", config)
    if main == "pixel_values" or hasattr(config, "vision_config"):
        size = getattr(vision, "image_size", 32)
        channels = getattr(vision, "num_channels", 3)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        inputs["pixel_values"] = torch.randn(batch, channels, height, width, generator=generator)
    if main == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 1500)
        bins = getattr(config, "num_mel_bins", 80)
        inputs["input_features"] = torch.randn(batch, bins, frames, generator=generator)
    if main == "input_ids" or hasattr(config, "text_config"):
        inputs["input_ids"] = tokens()
        if arguments.padding != "none":
            mask = torch.ones(batch, length, dtype=torch.long)
            padded = (
                slice(0, length // 4) if arguments.padding == "left" else slice(-length // 4, None)
            )
            mask[0, padded] = 0
            inputs["attention_mask"] = mask
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens()
    return inputs


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
