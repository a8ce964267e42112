"""What the installed hosts can do: tests run with the lowest versions of pyproject.toml too."""

import importlib.metadata

import pytest


def version(package: str) -> tuple[int, ...]:
    """The first two numbers of an installed package's version; (0, 0) if it is not there."""
    try:
        text = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return 0, 0
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


TRANSFORMERS_5 = version("transformers") >= (5, 0)

HEAD = "lm_head.weight" if TRANSFORMERS_5 else "embed_out.weight"
"""The output layer of GPT-NeoX; the committed series has the name of version 5."""

# Lightning 2.4 has no such option.
WEIGHTS_ONLY = {"weights_only": True} if version("pytorch-lightning") >= (2, 6) else {}

stays_compiled = pytest.mark.skipif(
    version("torch") < (2, 10), reason="with torch 2.9 windows run uncompiled"
)
needs_torch_2_10 = pytest.mark.skipif(
    version("torch") < (2, 10), reason="the CPU kernel of torch 2.9 cannot be split over ranks"
)
