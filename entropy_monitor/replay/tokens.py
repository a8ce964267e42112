"""The sequences every checkpoint sees: fixed length, the same for all, so that rows are paired.

Text is tokenised once, without cutting at lines, and cut into sequences that do not overlap. What a
tokenizer adds by itself (``[CLS]`` ... ``[SEP]``, ``<bos>``) is added to every sequence by default;
Pythia's adds nothing, and its training used none.
"""

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from entropy_monitor.replay.errors import ReplayError

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TokenSpec:
    """Where the sequences come from.

    Attributes:
        text: A UTF-8 text file.
        tokens: A ``.npy`` file of token ids ``(sequences, length)``, instead of text.
        length: Tokens per sequence; None: the model's own maximum, at most 2048 (for `tokens`: as
            stored).
        sequences: How many sequences; None: 32 of a text, all of `tokens`.
        prefix: ``auto`` (what the tokenizer adds by itself), ``none``, ``bos``, or token ids
            separated by commas.
        tokenizer: Path or hub name, where the model's own folder has none.
    """

    text: str | None = None
    tokens: str | None = None
    length: int | None = None
    sequences: int | None = None
    prefix: str = "auto"
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.tokens is None):
            raise ReplayError("give either --text FILE or --tokens FILE.npy.")
        for name in ("length", "sequences"):
            value = getattr(self, name)
            if value is not None and value < (3 if name == "length" else 1):
                raise ReplayError(
                    f"`--{name}` must be at least {3 if name == 'length' else 1}, got {value}."
                )


def load_token_file(spec: TokenSpec) -> Tokens:
    """Read token ids.

    Raises:
        ReplayError: If the file is not a ``.npy`` of whole numbers >= 0 with shape (sequences,
            length), or holds less than what was asked for.
    """
    assert spec.tokens is not None
    path = Path(spec.tokens)
    if not path.is_file():
        raise ReplayError(f"`--tokens {path}` does not exist.")
    try:
        ids = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ReplayError(f"`--tokens {path}` is not a .npy file of numbers ({error}).") from error
    if not isinstance(ids, np.ndarray) or ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
        shape = f"{ids.dtype} {ids.shape}" if isinstance(ids, np.ndarray) else "an archive"
        raise ReplayError(
            f"`--tokens {path}` must hold integers of shape (sequences, length); got {shape}."
        )
    if ids.size == 0 or ids.min() < 0:
        raise ReplayError(
            f"`--tokens {path}` must hold token ids >= 0; got "
            f"{'none' if not ids.size else ids.min()}."
        )
    length = spec.length or ids.shape[1]
    count = spec.sequences or ids.shape[0]
    if length > ids.shape[1] or count > ids.shape[0] or length < 3:
        raise ReplayError(
            f"`--tokens {path}` holds {ids.shape[0]} sequences of {ids.shape[1]}; asked were "
            f"{count} of {length} (at least 3)."
        )
    return np.ascontiguousarray(ids[:count, :length], dtype=np.int64)


def check_text(spec: TokenSpec) -> None:
    """Say that a text does not exist before a tokenizer is looked for.

    Raises:
        ReplayError: If the file does not exist.
    """
    assert spec.text is not None
    if not Path(spec.text).is_file():
        raise ReplayError(f"`--text {spec.text}` does not exist.")


def cut_text(spec: TokenSpec, tokenizer: Any, longest: int | None) -> Tokens:
    """Tokenise a text and cut it.

    Args:
        spec: What to read and how to cut.
        tokenizer: A transformers tokenizer.
        longest: The model's maximum length, if it has one.

    Returns:
        Token ids ``(sequences, length)``.

    Raises:
        ReplayError: If the text cannot be read or is too short for one sequence.
    """
    assert spec.text is not None
    path = Path(spec.text)
    check_text(spec)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReplayError(f"`--text {path}` cannot be read as UTF-8 text ({error}).") from error
    length = spec.length or min(longest or 2048, 2048)
    if longest is not None and length > longest:
        raise ReplayError(f"`--length {length}` is more than the model's {longest}.")
    before, after = special_tokens(tokenizer, spec.prefix)
    body = length - len(before) - len(after)
    if body < 2:
        raise ReplayError(
            f"`--length {length}` leaves no room beside {len(before) + len(after)} special tokens."
        )
    ids = encode(tokenizer, text)
    available = len(ids) // body
    if available < 1:
        shorter = max(3, 1 << max(2, (len(ids) + len(before) + len(after)).bit_length() - 2))
        raise ReplayError(
            f"`--text {path}` is too short: {len(ids)} tokens, one sequence needs {body}; "
            f"give a longer text or a smaller --length (such as {shorter})."
        )
    count = min(available, spec.sequences or 32)
    if spec.sequences is not None and count < spec.sequences:
        raise ReplayError(
            f"`--text {path}` gives {available} sequences of {length} tokens; `--sequences "
            f"{spec.sequences}` asks for more."
        )
    cut = np.asarray(ids[: count * body], dtype=np.int64).reshape(count, body)
    edges = [
        np.broadcast_to(np.asarray(edge, dtype=np.int64), (count, len(edge)))
        for edge in (before, after)
    ]
    return np.concatenate([edges[0], cut, edges[1]], axis=1)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokenise without special tokens and without a warning about length: it is cut afterwards."""
    return [int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


def special_tokens(tokenizer: Any, prefix: str) -> tuple[list[int], list[int]]:
    """Return the ids before and after every sequence.

    Raises:
        ReplayError: If the tokenizer has no ``<bos>``, or the prefix is neither a known word nor a
            list of ids.
    """
    if prefix == "none":
        return [], []
    if prefix == "bos":
        if tokenizer.bos_token_id is None:
            raise ReplayError("`--prefix bos`: this tokenizer has no beginning-of-sequence token.")
        return [int(tokenizer.bos_token_id)], []
    if prefix == "auto":
        plain = encode(tokenizer, "a")
        full = [int(i) for i in tokenizer("a")["input_ids"]]
        at = next((k for k in range(len(full)) if full[k : k + len(plain)] == plain), 0)
        return full[:at], full[at + len(plain) :]
    try:
        return [int(piece) for piece in prefix.split(",")], []
    except ValueError:
        raise ReplayError(
            f"`--prefix` must be auto, none, bos or token ids such as 0 or 1,2; got {prefix!r}."
        ) from None


def load_tokenizer(where: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load a tokenizer from a folder, a ``.gguf`` file or the hub.

    Raises:
        ReplayError: If there is none.
    """
    from transformers import AutoTokenizer

    path = Path(where)
    arguments: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    target = str(where)
    gguf = (
        path
        if path.suffix == ".gguf"
        else next(iter(sorted(path.glob("*.gguf"))), None)
        if path.is_dir()
        else None
    )
    if gguf is not None:
        target, arguments["gguf_file"] = str(gguf.parent), gguf.name
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a .gguf file brings a progress bar
            return AutoTokenizer.from_pretrained(target, **arguments)
    except Exception as error:
        first = str(error).strip().splitlines()[:1]
        raise ReplayError(
            f"no tokenizer in {where} ({type(error).__name__}: {first[0][:120] if first else ''}): "
            f"name one with "
            "--tokenizer, or give token ids with --tokens."
        ) from error


def longest_sequence(config: Any) -> int | None:
    """Return the model's maximum length from its configuration."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
