r"""Megatron's indexed dataset, written without importing Megatron, which takes seconds and needs a device.

Little-endian throughout::

    PREFIX.bin   the tokens of all documents, uint16 or int32
    PREFIX.idx   b"MMIDIDX\0\0" | version 1: u64 | token type: u8 | sequences n: u64 | n + 1: u64
                 | tokens of each sequence: n × i32 | its byte offset in .bin: n × i64 | first sequence of each
                   document, and n at the end: (n + 1) × i64

Every document is one sequence.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from pathlib import Path
from types import TracebackType

_MAGIC = b"MMIDIDX\x00\x00"
_CODES = {2: 8, 4: 4}
"""Bytes of a token -> Megatron's code of its type: uint16, int32."""


def token_bytes(vocabulary: int) -> int:
    """Bytes in which Megatron keeps a token of a vocabulary of this size."""
    return 2 if vocabulary < 65500 else 4


def part(prefix: Path, suffix: str) -> Path:
    """``PREFIX`` with `suffix`; Path.with_suffix() would cut a prefix that has a dot."""
    return Path(f"{os.fspath(prefix)}{suffix}")


class Writer:
    """Writes ``PREFIX.bin`` as documents come, and ``PREFIX.idx`` at the end of a ``with`` block that did not fail."""

    def __init__(self, prefix: Path, width: int) -> None:
        self._prefix, self._width = prefix, width
        self.lengths = array("i")
        prefix.parent.mkdir(parents=True, exist_ok=True)
        part(prefix, ".idx").unlink(missing_ok=True)  # an interrupted run must not pass for a finished one
        self._stream = open(part(prefix, ".bin"), "wb")  # noqa: SIM115  (closed in __exit__)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        if kind is None:
            part(self._prefix, ".idx").write_bytes(index(self.lengths, self._width))

    def add(self, tokens: bytes) -> None:
        """One document, already encoded."""
        self._stream.write(tokens)
        self.lengths.append(len(tokens) // self._width)


def index(lengths: array[int], width: int) -> bytes:
    """The content of ``PREFIX.idx`` for documents of these lengths and tokens of `width` bytes."""
    offsets, documents = array("q"), array("q", range(len(lengths) + 1))
    position = 0
    for length in lengths:
        offsets.append(position)
        position += width * length
    columns = (array("i", lengths), offsets, documents)
    if sys.byteorder == "big":
        for column in columns:
            column.byteswap()
    header = _MAGIC + struct.pack("<QBQQ", 1, _CODES[width], len(lengths), len(documents))
    return header + b"".join(column.tobytes() for column in columns)
