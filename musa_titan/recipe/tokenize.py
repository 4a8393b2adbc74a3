"""Text → Megatron's indexed dataset, with the Hugging Face tokenizer of a local directory.

A ``.jsonl`` file has one document a line, its text under one key; any other file is one document. Every document is
followed by the tokenizer's end-of-text token. Documents keep their order, whatever the number of processes.

A directory with a ``tokenizer.json`` is read with the small package ``tokenizers``; others (sentencepiece, or Python
code of their own) need ``transformers``. Megatron itself loads either with transformers.
"""

from __future__ import annotations

import json
import multiprocessing
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from musa_titan.patching.spec import MusaTitanError
from musa_titan.recipe.indexed import Writer, token_bytes

BATCH = 64
"""Documents that a process gets at a time."""


@dataclass(frozen=True)
class Result:
    documents: int
    tokens: int
    vocabulary: int
    """Of the tokenizer, with its added tokens."""


def documents(files: Sequence[Path], key: str) -> Iterator[str]:
    """The texts of `files`, empty ones left out.

    Raises:
        MusaTitanError: a line is not JSON or has no text under `key`; names file and line.
    """
    for path in files:
        if path.suffix != ".jsonl":
            text = path.read_text(encoding="utf-8", errors="replace")
            if text:
                yield text
            continue
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                text = _text(line, key, f"{path}, line {number}")
                if text:
                    yield text


def tokenize(
    prefix: Path, files: Sequence[Path], tokenizer: Path, key: str = "text", workers: int = 1, code: bool = False
) -> Result:
    """Write `files` as the dataset `prefix`; `code`: the tokenizer may run Python of its own.

    Raises:
        MusaTitanError: no tokenizer, no end-of-text token, a line that is no document, or no document at all.
    """
    vocabulary = load(tokenizer, code).vocabulary
    width = token_bytes(vocabulary)
    tokens = 0
    with Writer(prefix, width) as writer:
        for batch in _encoded(_batches(documents(files, key)), tokenizer, code, width, workers):
            for document in batch:
                writer.add(document)
                tokens += len(document) // width
        if not writer.lengths:
            raise MusaTitanError(f"{len(files)} files, and no document in them")
    return Result(len(writer.lengths), tokens, vocabulary)


@dataclass(frozen=True)
class Encoder:
    """A tokenizer, reduced to what is needed here."""

    encode: Callable[[str], list[int]]
    """Ids of a text, without any special token."""
    end: int
    """Id of the end-of-text token."""
    vocabulary: int


def load(directory: Path, code: bool) -> Encoder:
    """The tokenizer in `directory`. Never looks on the network.

    Raises:
        MusaTitanError: there is no tokenizer, no package to read it, or no end-of-text token.
    """
    if not directory.is_dir():
        raise MusaTitanError(f"{directory} is not a directory with a tokenizer")
    found = _from_json(directory) if (directory / "tokenizer.json").is_file() else _from_transformers(directory, code)
    if found is None:
        raise MusaTitanError(f"{directory} has no end-of-text token (eos_token), which separates documents")
    return found


def _from_json(directory: Path) -> Encoder | None:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise MusaTitanError("tokenizing needs tokenizers: pip install 'musa-titan[data]'") from None
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    settings = directory / "tokenizer_config.json"
    end = json.loads(settings.read_text(encoding="utf-8")).get("eos_token") if settings.is_file() else None
    name = end.get("content") if isinstance(end, dict) else end
    number = tokenizer.token_to_id(name) if name else None
    if number is None:
        return None
    return Encoder(
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids), number, tokenizer.get_vocab_size()
    )


def _from_transformers(directory: Path, code: bool) -> Encoder | None:
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError:
        raise MusaTitanError(
            f"{directory} has no tokenizer.json; to read anything else install transformers: pip install transformers"
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=code)
    except (OSError, ValueError) as error:
        raise MusaTitanError(f"{directory} holds no tokenizer: {' '.join(str(error).split())[:200]}") from None
    if tokenizer.eos_token_id is None:
        return None
    return Encoder(
        lambda text: list(tokenizer.encode(text, add_special_tokens=False)), tokenizer.eos_token_id, len(tokenizer)
    )


def _text(line: str, key: str, where: str) -> str:
    try:
        text = json.loads(line)[key]
    except (ValueError, KeyError, TypeError):
        raise MusaTitanError(f"{where} is not a JSON object with text under {key!r}; see --key") from None
    if not isinstance(text, str):
        raise MusaTitanError(f"{where}: {key!r} is not text")
    return text


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _encoded(
    batches: Iterator[list[str]], tokenizer: Path, code: bool, width: int, workers: int
) -> Iterator[list[bytes]]:
    if workers == 1:
        _start(tokenizer, code, width)
        yield from map(_encode, batches)
        return
    context = multiprocessing.get_context("spawn")  # a fork would share the tokenizer's threads
    with context.Pool(workers, _start, (tokenizer, code, width)) as pool:
        yield from pool.imap(_encode, batches)


_encoder: Encoder | None = None
_width = 0


def _start(tokenizer: Path, code: bool, width: int) -> None:
    global _encoder, _width
    _encoder, _width = load(tokenizer, code), width


def _encode(batch: list[str]) -> list[bytes]:
    assert _encoder is not None
    encoded = []
    for text in batch:
        ids = array("H" if _width == 2 else "i", _encoder.encode(text))
        ids.append(_encoder.end)
        encoded.append(ids.tobytes())
    return encoded
