"""Text becomes what Megatron's own reader reads, with a real Hugging Face tokenizer from a local directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from musa_titan.patching.spec import MusaTitanError
from musa_titan.recipe.indexed import token_bytes
from musa_titan.recipe.tokenize import documents, tokenize

TEXTS = ["The quick brown fox.", "", "Ein süßer Igel läuft über den Weg.\nUnd zurück.", "once more " * 50]


def make_tokenizer(directory: Path, vocabulary: int = 300, end: str | None = "<end>") -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=["<end>"], initial_alphabet=alphabet)
    )
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text, "id": number}) + "\n" for number, text in enumerate(texts)))
    return path


def read_with_megatron(prefix: Path) -> list[list[int]]:
    """Documents as Megatron's IndexedDataset sees them, in a process of its own."""
    program = (
        "import json, sys, musa_titan; musa_titan.apply_pretrain_patch()\n"
        "from megatron.core.datasets.indexed_dataset import IndexedDataset\n"
        "d = IndexedDataset(sys.argv[1])\n"
        "print(json.dumps([d[i].tolist() for i in range(len(d))]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(prefix)], capture_output=True, text=True, check=True,
        env={**os.environ, "ACCELERATOR_BACKEND": "cpu"},
    )  # fmt: skip
    found: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_megatron_reads_back_every_document(tmp_path: Path) -> None:
    directory = make_tokenizer(tmp_path / "tokenizer")
    plain = tmp_path / "plain.txt"
    plain.write_text("A file is one document.\n")
    files = [jsonl(tmp_path / "a.jsonl", TEXTS), plain]
    result = tokenize(tmp_path / "out" / "data.v1", files, directory)
    found = read_with_megatron(tmp_path / "out" / "data.v1")
    reader = Tokenizer.from_file(str(directory / "tokenizer.json"))
    kept = [text for text in TEXTS if text] + ["A file is one document.\n"]
    assert [reader.decode(document[:-1]) for document in found] == kept
    assert {document[-1] for document in found} == {reader.token_to_id("<end>")}
    assert (result.documents, result.tokens) == (4, sum(map(len, found)))


def test_order_and_bytes_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    directory = make_tokenizer(tmp_path / "tokenizer")
    files = [jsonl(tmp_path / "a.jsonl", [f"document {number} " * (number % 7 + 1) for number in range(300)])]
    for workers in (1, 2):
        tokenize(tmp_path / f"by-{workers}", files, directory, workers=workers)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"by-1{suffix}").read_bytes() == (tmp_path / f"by-2{suffix}").read_bytes()


def test_a_large_vocabulary_takes_four_bytes() -> None:
    assert token_bytes(65_499) == 2
    assert token_bytes(65_500) == token_bytes(163_840) == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "line 2 is not a JSON object with text under 'text'"),
        ('{"body": "x"}', "line 2 is not a JSON object with text under 'text'"),
        ('["text"]', "line 2 is not a JSON object"),
        ('{"text": 5}', "line 2: 'text' is not text"),
    ],
)
def test_a_line_that_is_no_document_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(MusaTitanError, match=message):
        list(documents([path], "text"))


def test_another_key(tmp_path: Path) -> None:
    assert list(documents([jsonl(tmp_path / "a.jsonl", ["x", "y"], key="content")], "content")) == ["x", "y"]


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    files = [jsonl(tmp_path / "a.jsonl", TEXTS)]
    with pytest.raises(MusaTitanError, match="is not a directory with a tokenizer"):
        tokenize(tmp_path / "out", files, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(MusaTitanError, match=r"has no tokenizer\.json"):
        tokenize(tmp_path / "out", files, tmp_path / "empty")
    with pytest.raises(MusaTitanError, match="no end-of-text token"):
        tokenize(tmp_path / "out", files, make_tokenizer(tmp_path / "endless", end=None))
    with pytest.raises(MusaTitanError, match="1 files, and no document in them"):
        tokenize(tmp_path / "out", [jsonl(tmp_path / "b.jsonl", [""])], make_tokenizer(tmp_path / "tokenizer"))
    assert not (tmp_path / "out.idx").exists()
