"""A series on the Hugging Face hub: revisions are listed, fetched one ahead, and deleted after use.

Everything goes through `huggingface_hub`, so tokens, mirrors (``HF_ENDPOINT``) and proxies work as
everywhere else. Broken downloads are tried again; a revision that is not there is reported and left
out.
"""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from entropy_monitor.replay.checkpoints import Checkpoint, in_order, parse_step
from entropy_monitor.replay.errors import CheckpointError, ReplayError
from entropy_monitor.replay.weights import hash_file

T = TypeVar("T")
Files = dict[str, tuple[int, str | None]]
"""Names in a revision, their bytes and, where the hub tells it, their SHA-256."""

_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_SMALL = ("config.json", "generation_config.json")
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "added_tokens.json",
    "config.json",
)


class HubSource:
    """The revisions of a model that have a step in their name (Pythia: ``step0 ... step143000``).

    Args:
        repo: ``OWNER/NAME``.
        folder: Where downloads go; each revision has its own sub-folder there.
        keep: Download into the hub's own cache instead and leave it there.
        attempts: How often a download is tried.
        pause: Seconds before the second try; doubled each time, at most 60.

    Raises:
        ReplayError: If the repository cannot be listed.
    """

    remote = True

    def __init__(
        self,
        repo: str,
        folder: Path | str,
        *,
        keep: bool = False,
        attempts: int = 5,
        pause: float = 2.0,
    ) -> None:
        from huggingface_hub import HfApi

        self.label = repo
        self.folder = Path(folder)
        self.keep = keep
        self.attempts = attempts
        self.pause = pause
        self._api = HfApi()
        self._listing: dict[str, Files] = {}
        self.checkpoints = in_order(self._list())

    def _list(self) -> list[Checkpoint]:
        from huggingface_hub.errors import (
            GatedRepoError,
            HFValidationError,
            RepositoryNotFoundError,
        )

        try:
            refs = self._try(lambda: self._api.list_repo_refs(self.label))
        except GatedRepoError:
            raise ReplayError(
                f"{self.label} is gated: accept its terms on the hub and log in (`hf auth login`)."
            ) from None
        except (RepositoryNotFoundError, HFValidationError):
            raise ReplayError(
                f"`{self.label}` is neither a path on this machine nor a model on the hub."
            ) from None
        except Exception as error:
            raise ReplayError(
                f"cannot list {self.label} on {self._api.endpoint}: {_line(error)}"
            ) from error
        names = [ref.name for ref in (*refs.branches, *refs.tags)]
        steps = {
            name: step
            for name in names
            if name != "main" and (step := parse_step(name)) is not None
        }
        if not steps:  # an ordinary model: one checkpoint
            return [Checkpoint(name="main", step=0, where="main")]
        return [Checkpoint(name=name, step=step, where=name) for name, step in steps.items()]

    def fetch(self, checkpoint: Checkpoint) -> Path:
        """Download config and weights of one revision, and check their checksums.

        Raises:
            CheckpointError: ``missing`` if the revision or its weights are not there; ``failed`` if
                the download broke every time; ``corrupt`` if what arrived is not what the hub
                announced.
        """
        if checkpoint.problem is not None:
            raise CheckpointError("missing", checkpoint.problem)
        files = self._files(checkpoint)
        weights = _weights_name(files)
        if weights is None:
            reason = f"revision {checkpoint.name} has no safetensors or .bin weights"
            raise CheckpointError("missing", reason)
        last: Exception | None = None
        for attempt in range(self.attempts):
            self._wait(attempt)
            try:
                # a wrong file must not be taken for a finished download
                return self._download(checkpoint, files, weights, anew=_is_corrupt(last))
            except Exception as error:
                if isinstance(error, CheckpointError) and not _is_corrupt(error):
                    raise
                _raise_if_final(error, checkpoint)
                last = error
        if isinstance(last, CheckpointError):
            raise last
        raise CheckpointError(
            "failed", f"download failed {self.attempts} times, last: {_line(last)}"
        ) from last

    def _download(
        self, checkpoint: Checkpoint, files: Files, weights: str, *, anew: bool = False
    ) -> Path:
        cache = None if self.keep else str(self._cache(checkpoint))

        def get(name: str) -> Path:
            path = self._api.hf_hub_download(
                self.label, name, revision=checkpoint.where, cache_dir=cache, force_download=anew
            )
            return Path(path)

        for name in _SMALL:
            if name in files:
                get(name)
        first = get(weights)
        names = [weights]
        if weights.endswith(".index.json"):
            names = sorted(
                set(json.loads(first.read_text(encoding="utf-8"))["weight_map"].values())
            )
        for name in names:
            if name not in files:
                raise CheckpointError("missing", f"revision {checkpoint.name} lacks {name}")
            path = first if name == weights else get(name)
            size, sha = files[name]
            if path.stat().st_size != size:
                reason = f"{name}: {path.stat().st_size} of {size} bytes arrived"
                raise CheckpointError("corrupt", reason)
            if sha is not None and hash_file(path) != sha:
                reason = f"{name}: its SHA-256 is not the one the hub announces"
                raise CheckpointError("corrupt", reason)
        return first.parent

    def _cache(self, checkpoint: Checkpoint) -> Path:
        return self.folder / checkpoint.name.replace("/", "--")

    def release(self, checkpoint: Checkpoint) -> None:
        """Delete what `fetch` downloaded, unless it is kept."""
        if not self.keep:
            shutil.rmtree(self._cache(checkpoint), ignore_errors=True)

    def fingerprint(self, checkpoint: Checkpoint) -> str | None:
        """Return the hub's checksums of the weight files: equal ones need no second download."""
        try:
            files = self._files(checkpoint)
        except CheckpointError:
            return None
        weights = _weights_name(files)
        if weights is None:
            return None
        sums = [files[name][1] for name in _all_weights(files, weights)]
        return None if None in sums else "+".join(s for s in sums if s)

    def size(self, checkpoint: Checkpoint) -> int | None:
        """Return the bytes of the weights of one revision, by the hub's listing."""
        try:
            files = self._files(checkpoint)
        except CheckpointError:
            return None
        weights = _weights_name(files)
        if weights is None:
            return None
        return sum(files[name][0] for name in _all_weights(files, weights))

    def shared_file(self, name: str) -> Path | None:
        """Download a small file (config, tokenizer) from the first revision that can be reached."""
        cache = None if self.keep else str(self.folder / "shared")
        for checkpoint in (*self.checkpoints[-1:], *self.checkpoints[:3]):
            try:
                if name in self._files(checkpoint):
                    return Path(
                        self._try(
                            lambda where=checkpoint.where: self._api.hf_hub_download(  # type: ignore[misc]
                                self.label, name, revision=where, cache_dir=cache
                            )
                        )
                    )
            except Exception:  # the next revision may have it
                continue
        return None

    def tokenizer_folder(self) -> Path | None:
        """Download the tokenizer's files and return their folder."""
        found = [path for name in _TOKENIZER if (path := self.shared_file(name)) is not None]
        return found[0].parent if found else None

    def _files(self, checkpoint: Checkpoint) -> Files:
        """Return name -> (bytes, SHA-256) of a revision."""
        if checkpoint.where not in self._listing:
            try:
                info = self._try(
                    lambda: self._api.model_info(
                        self.label, revision=checkpoint.where, files_metadata=True
                    )
                )
            except Exception as error:
                _raise_if_final(error, checkpoint)
                raise CheckpointError(
                    "failed", f"the hub does not answer: {_line(error)}"
                ) from error
            self._listing[checkpoint.where] = {
                s.rfilename: (s.size or 0, _lfs_sha(s))
                for s in info.siblings or []
                if "/" not in s.rfilename
            }
        return self._listing[checkpoint.where]

    def _try(self, call: Callable[[], T]) -> T:
        """Call, and again after a network error; what another try cannot mend is raised."""
        for attempt in range(self.attempts):
            self._wait(attempt)
            try:
                return call()
            except Exception as error:
                if _is_final(error) or attempt == self.attempts - 1:
                    raise
        raise AssertionError("unreachable")

    def _wait(self, attempt: int) -> None:
        if attempt:
            time.sleep(min(60.0, self.pause * 2 ** (attempt - 1)))


def _weights_name(files: Files) -> str | None:
    return next((name for name in _WEIGHTS if name in files), None)


def _all_weights(files: Files, weights: str) -> list[str]:
    """Names of the weight files, without reading an index: all of its kind."""
    if not weights.endswith(".index.json"):
        return [weights]
    suffix = ".safetensors" if "safetensors" in weights else ".bin"
    return sorted(name for name in files if name.endswith(suffix))


def _is_corrupt(error: Exception | None) -> bool:
    return isinstance(error, CheckpointError) and error.status == "corrupt"


def _lfs_sha(sibling: Any) -> str | None:
    lfs = getattr(sibling, "lfs", None)
    if lfs is None:
        return None
    return lfs["sha256"] if isinstance(lfs, dict) else getattr(lfs, "sha256", None)


def _is_final(error: Exception) -> bool:
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(
        error, LocalEntryNotFoundError
    ):  # "could not reach the hub and nothing is cached": a network error
        return False
    kinds = (EntryNotFoundError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError)
    return isinstance(error, kinds)  # GatedRepoError is a RepositoryNotFoundError


def _raise_if_final(error: Exception, checkpoint: Checkpoint) -> None:
    if _is_final(error):
        raise CheckpointError("missing", f"revision {checkpoint.name} is not on the hub") from error


def _line(error: Exception | None) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__
