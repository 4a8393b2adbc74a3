"""Text files → a corpus that Megatron trains on, byte-level, with nothing but the standard library.

A document is one file: its bytes are its tokens, followed by the end-of-document token 256. The vocabulary is therefore
257 (``--tokenizer-type NullTokenizer --vocab-size 257``: a tokenised corpus needs the tokenizer for these two numbers
only). No vocabulary has to be downloaded, and any encoding is accepted.

The result is Megatron's indexed dataset (``indexed.py``), and ``PREFIX.json``: what it was made from, so that an
unchanged corpus is not made again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from musa_titan.recipe.indexed import Writer, part, token_bytes

END_OF_DOCUMENT = 256
VOCABULARY = 257

_END = struct.pack("<H", END_OF_DOCUMENT)
_LAYOUT = 1  # raised when the same input would give another result


@dataclass(frozen=True)
class Corpus:
    """What ``PREFIX.json`` says about a corpus."""

    fingerprint: str
    documents: int
    tokens: int


def select_files(roots: Iterable[Path], include: Sequence[str], skip: Sequence[str]) -> list[Path]:
    """Files below `roots` that match a glob of `include` and have no name of `skip` in their path, sorted.

    Globs are ``pathlib``'s, relative to the root: ``*.py`` means the root's own files, ``**/*.py`` all levels. A root
    that is a file is taken as it is.
    """
    found: set[Path] = set()
    for root in roots:
        if root.is_file():
            found.add(root)
            continue
        for pattern in include:
            for path in root.glob(pattern):
                if path.is_file() and not set(skip) & set(path.relative_to(root).parts):
                    found.add(path)
    return sorted(found)


def build_corpus(prefix: Path, files: Sequence[Path]) -> tuple[Corpus, bool]:
    """Write `files` as the corpus `prefix`; returns it, and whether it had to be made.

    Raises:
        ValueError: no file has any content.
    """
    fingerprint = _fingerprint(files)
    known = read_corpus(prefix)
    if known is not None and known.fingerprint == fingerprint:
        return known, False

    part(prefix, ".json").unlink(missing_ok=True)  # an interrupted run must not pass for a finished one
    with Writer(prefix, token_bytes(VOCABULARY)) as writer:
        for path in files:
            content = path.read_bytes()
            if content:
                writer.add(encode(content))
        if not writer.lengths:
            raise ValueError(f"{len(files)} files, and none of them has any content")
    corpus = Corpus(fingerprint, len(writer.lengths), sum(writer.lengths))
    part(prefix, ".json").write_text(json.dumps(asdict(corpus)) + "\n", encoding="utf-8")
    return corpus, True


def read_corpus(prefix: Path) -> Corpus | None:
    """The finished corpus `prefix`, or None."""
    if not all(part(prefix, suffix).is_file() for suffix in (".bin", ".idx", ".json")):
        return None
    return Corpus(**json.loads(part(prefix, ".json").read_text(encoding="utf-8")))


def encode(content: bytes) -> bytes:
    """One document as little-endian uint16 tokens, with the end-of-document token."""
    tokens = bytearray(2 * len(content))
    tokens[::2] = content
    return bytes(tokens) + _END


def _fingerprint(files: Sequence[Path]) -> str:
    digest = hashlib.sha256(f"layout {_LAYOUT}\n".encode())
    for path in files:
        status = path.stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m musa_titan.recipe.corpus",
        description="Turn text files into a byte-level corpus (PREFIX.bin, PREFIX.idx) for Megatron's --data-path. "
        f"Train on it with --tokenizer-type NullTokenizer --vocab-size {VOCABULARY}.",
    )
    parser.add_argument("prefix", type=Path, metavar="PREFIX", help="where to write, without .bin and .idx")
    parser.add_argument("roots", type=Path, nargs="+", metavar="PATH", help="files, and folders to search")
    parser.add_argument(
        "--include",
        action="append",
        metavar="GLOB",
        help="files to take from a folder, relative to it; may be repeated (default: **/*.txt)",
    )
    parser.add_argument(
        "--skip", action="append", default=[], metavar="NAME", help="leave out files and folders of this name"
    )
    options = parser.parse_args(arguments)
    missing = [str(root) for root in options.roots if not root.exists()]
    if missing:
        parser.error(f"no such file or folder: {', '.join(missing)}")
    files = select_files(options.roots, options.include or ["**/*.txt"], options.skip)
    try:
        corpus, made = build_corpus(options.prefix, files)
    except ValueError as error:
        parser.error(f"{error}; check PATH, --include and --skip")
    state = "written" if made else "up to date"
    print(f"{options.prefix}: {corpus.documents:,} documents, {corpus.tokens:,} tokens, {state}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
