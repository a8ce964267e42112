"""From a configuration and a state dict to a model that can be run.

Code in checkpoints is never executed. The architecture comes from ``config.json`` (Hugging Face
layout) or from a factory the user names; the weights are read by `entropy_monitor.replay.weights`
and handed over as tensors, so that every file format goes one way.
"""

import contextlib
import importlib
import inspect
import io
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from entropy_monitor.replay.errors import CheckpointError, ReplayError
from entropy_monitor.replay.weights import find_weights, hash_file, hash_weights, read_weights

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_WRAPPERS = re.compile(r"(^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_BESIDE_ATTENTION = ("lm_head", "embed_out", "pooler", "cls.", "classifier", "score.")
"""Weights after the last attention: a checkpoint without them gives the same attention."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """How to build the model of a series.

    Attributes:
        config: Path of a ``config.json`` or of a folder with one; None looks beside the weights.
        build: ``package.module:function`` that returns an `nn.Module`, for models that are not from
            transformers.
        dtype: ``float32`` (default: what differs between checkpoints should not be rounding),
            ``bfloat16``,
            ``float16``, ``float64`` or ``auto`` (as stored).
        device: ``cpu``, ``cuda``, ``cuda:1``, ``mps``.
        attention: ``sdpa`` or ``eager``.
        trust_remote_code: Whether code that comes with the model may run.
    """

    config: str | None = None
    build: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    attention: str = "sdpa"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in (*DTYPES, "auto"):
            raise ReplayError(
                f"`--dtype` must be one of {', '.join((*DTYPES, 'auto'))}; got {self.dtype!r}."
            )
        if self.attention not in ("sdpa", "eager"):
            raise ReplayError(f"`--attention` must be sdpa or eager; got {self.attention!r}.")
        if self.build is not None and not re.fullmatch(r"[\w.]+:[\w.]+", self.build):
            raise ReplayError(f"`--build` must be package.module:function; got {self.build!r}.")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model that can be run.

    Attributes:
        model: In eval mode, on its device.
        forward: Runs it on token ids ``(batch, length)``.
        weights_sha256: Hash of the weights as stored.
        parameters: Number of parameters.
    """

    model: nn.Module
    forward: Callable[[Tensor], None]
    weights_sha256: str
    parameters: int


def load_model(path: Path, spec: ModelSpec, *, config: Any = None) -> LoadedModel:
    """Build the model of one checkpoint.

    Args:
        path: Folder or weight file.
        spec: How to build it.
        config: A transformers configuration; None reads it (see `read_config`).

    Raises:
        CheckpointError: If the weights are missing, cannot be read, or do not fit the model.
        ReplayError: If the model itself cannot be built: no checkpoint of the series can be
            measured then.
    """
    found = find_weights(path)
    if found is not None and found.suffix == ".gguf":
        return _from_gguf(found, spec)
    state = clean_names(read_weights(path))
    digest = hash_weights(state)
    if spec.build is not None:
        model, prefix = _from_factory(state, spec, path.name)
    else:
        config = read_config(path, spec) if config is None else config
        model, prefix = _from_config(state, config, spec, path)
    del state
    return _ready(model, prefix, digest, spec)


def _ready(model: nn.Module, prefix: str, digest: str, spec: ModelSpec) -> LoadedModel:
    parameters = sum(p.numel() for p in model.parameters())
    model.eval().requires_grad_(False)
    try:
        model.to(spec.device)
    except (RuntimeError, AssertionError) as error:
        raise ReplayError(
            f"`--device {spec.device}` cannot be used: {str(error).splitlines()[0]}"
        ) from error
    return LoadedModel(
        model=nest(model, prefix),
        forward=forward_of(model, spec.device),
        weights_sha256=digest,
        parameters=parameters,
    )


def read_config(path: Path, spec: ModelSpec, shared: Path | None = None) -> Any:
    """Return the transformers configuration of a checkpoint.

    Args:
        path: The checkpoint.
        spec: May name a configuration.
        shared: A ``config.json`` of the whole series, used where the checkpoint has none.

    Raises:
        ReplayError: If there is none, or transformers cannot read it.
    """
    from transformers import AutoConfig

    if spec.config is not None:
        where = Path(spec.config)
        if not where.exists():
            raise ReplayError(f"`--model-config {spec.config}` does not exist.")
    else:
        folder = path if path.is_dir() else path.parent
        candidates = [folder / "config.json", *([shared] if shared is not None else [])]
        existing = [c for c in candidates if c.is_file()]
        if not existing:
            raise ReplayError(
                f"no config.json beside {path}: name one with --model-config, or a function that "
                f"builds the model "
                "with --build package.module:function."
            )
        where = existing[0]
    try:
        return AutoConfig.from_pretrained(str(where), trust_remote_code=spec.trust_remote_code)
    except Exception as error:
        hint = (
            "; --trust-remote-code runs the model's own code"
            if "trust_remote_code" in str(error)
            else ""
        )
        raise ReplayError(f"transformers cannot read {where}: {_line(error)}{hint}") from error


def model_class(config: Any) -> Any:
    """Return the class of a configuration: the one of training, so that layers keep their names."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    causal = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    return transformers.AutoModelForCausalLM if type(config) in causal else transformers.AutoModel


def _from_config(
    state: dict[str, Tensor], config: Any, spec: ModelSpec, path: Path
) -> tuple[nn.Module, str]:
    cls = model_class(config)
    build = cls if hasattr(cls, "_from_config") else None
    try:
        with torch.device("meta"), quiet_transformers():
            skeleton = (
                build._from_config(config)
                if build is not None
                else cls.from_config(config, trust_remote_code=spec.trust_remote_code)
            )
    except Exception as error:
        raise ReplayError(
            f"transformers cannot build {cls.__name__} from the configuration: {_line(error)}"
        ) from error
    prefix, state = strip_prefix(state, set(skeleton.state_dict()))
    arguments: dict[str, Any] = {
        "config": config,
        "state_dict": state,
        "dtype": "auto" if spec.dtype == "auto" else DTYPES[spec.dtype],
        "attn_implementation": spec.attention,
        "output_loading_info": True,
    }
    try:
        with quiet_transformers():
            model, info = type(skeleton).from_pretrained(None, **arguments)
    except Exception as error:
        raise CheckpointError(
            "corrupt", f"{path.name} does not fit the configuration: {_line(error)}"
        ) from error
    missing = [
        n for n in sorted(info["missing_keys"]) if not any(part in n for part in _BESIDE_ATTENTION)
    ]
    _check_complete(missing, len(state), path.name)
    return model, prefix


def _from_factory(state: dict[str, Tensor], spec: ModelSpec, name: str) -> tuple[nn.Module, str]:
    assert spec.build is not None
    module_name, _, function = spec.build.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a script beside the user, as `python -m` would find it
    try:
        factory: Any = importlib.import_module(module_name)
        for part in function.split("."):
            factory = getattr(factory, part)
        model = factory()
    except Exception as error:
        raise ReplayError(f"`--build {spec.build}` does not work: {_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ReplayError(
            f"`--build {spec.build}` must return a torch.nn.Module; got {type(model).__name__}."
        )
    prefix, state = strip_prefix(state, set(model.state_dict()))
    try:
        result = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(
            "corrupt", f"{name} does not fit the model: {_line(error, 2)}"
        ) from error
    _check_complete(result.missing_keys, len(state), name)
    if spec.dtype != "auto":
        model.to(DTYPES[spec.dtype])
    return model, prefix


def _from_gguf(file: Path, spec: ModelSpec) -> LoadedModel:
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if spec.dtype == "auto" else DTYPES[spec.dtype]
    try:
        # its bar asks no one whether it is wanted
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(
                str(file.parent),
                gguf_file=file.name,
                dtype=dtype,
                attn_implementation=spec.attention,
            )
    except ImportError as error:
        raise ReplayError(f"{file.name} needs another package: {_line(error)}") from error
    except Exception as error:
        raise CheckpointError("corrupt", f"{file.name}: {_line(error)}") from error
    return _ready(model, "", hash_file(file), spec)


def _check_complete(missing: list[str], given: int, name: str) -> None:
    if missing:
        raise CheckpointError(
            "corrupt",
            f"{name} lacks {len(missing)} weights of the model ({given} given), first {missing[0]}",
        )


def clean_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove what torch.compile, DDP and FSDP put into names.

    Example:
        >>> import torch
        >>> list(clean_names({"module.net._orig_mod.weight": torch.zeros(1)}))
        ['net.weight']
    """
    cleaned = {_WRAPPERS.sub(r"\1", name): value for name, value in state.items()}
    if cleaned and all(name.startswith("module.") for name in cleaned):
        cleaned = {name.removeprefix("module."): value for name, value in cleaned.items()}
    return cleaned


def strip_prefix(state: Mapping[str, Tensor], expected: set[str]) -> tuple[str, dict[str, Tensor]]:
    """Find the attribute under which a LightningModule held the model, and the model's own weights.

    Args:
        state: Weights by name.
        expected: The model's own names.

    Returns:
        The prefix (``"model."``; empty where names fit as they are) and the weights without it;
        others are dropped.

    Example:
        >>> import torch
        >>> w = torch.zeros(1)
        >>> strip_prefix({"model.net.weight": w, "loss.scale": w}, {"net.weight"})[0]
        'model.'
    """
    best, hits = "", sum(name in expected for name in state)
    prefixes = {name[: i + 1] for name in state for i, letter in enumerate(name) if letter == "."}
    for prefix in sorted(prefixes, key=len):
        count = sum(name.startswith(prefix) and name[len(prefix) :] in expected for name in state)
        if count > hits:
            best, hits = prefix, count
    if not best:
        return "", dict(state)
    return best, {
        name[len(best) :]: value for name, value in state.items() if name.startswith(best)
    }


def nest(model: nn.Module, prefix: str) -> nn.Module:
    """Put a model back under its attribute, so that layers keep the names they had in training."""
    for part in reversed([p for p in prefix.split(".") if p]):
        holder = nn.Module()
        holder.add_module(part, model)
        model = holder
    return model


def forward_of(model: nn.Module, device: str) -> Callable[[Tensor], None]:
    """Return how to run a model on token ids, without what attention does not need."""
    parameters = inspect.signature(model.forward).parameters
    extra: dict[str, Any] = {}
    if "use_cache" in parameters:
        extra["use_cache"] = False
    if (
        "logits_to_keep" in parameters
    ):  # logits of every position would be the largest tensor of all
        extra["logits_to_keep"] = 1
    encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))

    def forward(ids: Tensor) -> None:
        ids = ids.to(device)
        if encoder_decoder:
            model(input_ids=ids, decoder_input_ids=ids, **extra)
        elif "input_ids" in parameters:
            model(input_ids=ids, **extra)
        else:
            model(ids)

    return forward


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and load reports: what matters is said once, by the replay."""
    from transformers.utils import logging as hf

    level, bar = hf.get_verbosity(), hf.is_progress_bar_enabled()
    hf.set_verbosity(logging.CRITICAL)
    hf.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hf.set_verbosity(level)
        if bar:
            hf.enable_progress_bar()  # type: ignore[no-untyped-call]


def _line(error: BaseException, line: int = 1) -> str:
    lines = [text.strip() for text in str(error).splitlines() if text.strip()]
    text = lines[min(line, len(lines)) - 1] if lines else ""
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
