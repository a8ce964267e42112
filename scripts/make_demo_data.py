"""Make the two data files of the demo from Jane Austen's *Pride and Prejudice* (1813).

The novel is in the public domain. It is taken from Debian's package ``r-cran-janeaustenr`` (R
package ``janeaustenr`` by Julia Silge, MIT), whose text is Project Gutenberg's without its header
and licence. No R is needed::

    apt-get download r-cran-janeaustenr
    dpkg -x r-cran-janeaustenr_*.deb unpacked
    python scripts/make_demo_data.py unpacked/usr/lib/R/site-library/janeaustenr/data

writes into ``entropy_monitor/demo/data``:

* ``bigrams.json``: the 64 most common characters of the novel and how often each follows each, a
  64 x 64 table;
* ``sample.txt``: its first chapters, about 100 kB, the text of ``examples/``.
"""

import argparse
import itertools
import json
import re
import struct
import zlib
from collections import Counter
from pathlib import Path

SOURCE = (
    "Jane Austen, Pride and Prejudice (1813), public domain; "
    "text as in the R package janeaustenr 1.0.0"
)
OUT = Path(__file__).resolve().parent.parent / "entropy_monitor" / "demo" / "data"
CHARACTERS = 64
SAMPLE_BYTES = 100_000

_STRING_VECTOR, _STRING = 16, 9


def lines_of(folder: Path, name: str = "prideprejudice") -> list[str]:
    """Read one character vector of an R lazy-load database (``Rdata.rdx``, ``Rdata.rdb``)."""
    index = zlib.decompress((folder / "Rdata.rdx").read_bytes(), 31)
    # The index is a list of (offset, length) pairs, integer vectors of length 2 in big-endian XDR,
    # then their names.
    pairs = [
        struct.unpack(">ii", m.group(1))
        for m in re.finditer(rb"\x00\x00\x00\x0d\x00\x00\x00\x02(.{8})", index, re.DOTALL)
    ]
    labels = re.findall(rb"\x00\x04\x00\x09\x00\x00\x00.([a-z]+)", index, re.DOTALL)
    names = [label.decode() for label in labels if label != b"names"]
    offset, length = pairs[names.index(name)]
    stored = (folder / "Rdata.rdb").read_bytes()[offset : offset + length]
    data = zlib.decompress(stored[4:])  # the first four bytes are the uncompressed length

    position = data.index(b"UTF-8") + len(b"UTF-8")
    kind, count = struct.unpack_from(">ii", data, position)
    if kind & 0xFF != _STRING_VECTOR:
        raise ValueError(
            f"{name} must be a character vector (type {_STRING_VECTOR}), got type {kind & 0xFF}."
        )
    position += 8
    lines = []
    for _ in range(count):
        flags, size = struct.unpack_from(">ii", data, position)
        if flags & 0xFF != _STRING:
            raise ValueError(
                f"expected a string at byte {position} of {name}, got type {flags & 0xFF}."
            )
        position += 8
        lines.append(data[position : position + size].decode("utf-8"))
        position += size
    return lines


def bigrams(text: str) -> tuple[str, list[list[int]]]:
    """The most common characters, most common first, and how often the second follows the first.

    All white space counts as one space. A pair with a character outside the table is not counted.
    """
    flat = re.sub(r"\s+", " ", text)
    ranked = sorted(Counter(flat).items(), key=lambda item: (-item[1], item[0]))
    characters = "".join(character for character, _ in ranked[:CHARACTERS])
    pairs = Counter(itertools.pairwise(flat))
    return characters, [[pairs[first, second] for second in characters] for first in characters]


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with Rdata.rdx and Rdata.rdb")
    text = "\n".join(lines_of(parser.parse_args().folder)) + "\n"
    if "universally acknowledged" not in text:
        raise ValueError("this is not Pride and Prejudice: its famous first sentence is missing.")
    characters, counts = bigrams(text)
    OUT.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join("    " + json.dumps(row, separators=(",", ":")) for row in counts)
    (OUT / "bigrams.json").write_text(
        f'{{\n  "source": {json.dumps(SOURCE)},\n  "made_by": "scripts/make_demo_data.py",\n'
        f'  "characters": {json.dumps(characters)},\n  "counts": [\n{rows}\n  ]\n}}\n',
        encoding="utf-8",
    )
    start = text.index("Chapter 1")
    end = text.rindex("\nChapter ", 0, start + SAMPLE_BYTES)  # whole chapters
    (OUT / "sample.txt").write_text(f"{SOURCE}.\n\n{text[start:end].rstrip()}\n", encoding="utf-8")
    print(f"{sum(map(sum, counts)):,} pairs; a sample of {end - start:,} characters")  # noqa: T201


if __name__ == "__main__":
    main()
