"""The corpus maker: what it selects, what it writes, when it writes again."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from musa_titan.recipe.corpus import END_OF_DOCUMENT, build_corpus, main, select_files

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "tree/b.py": b"b = 1\n", "tree/a.py": b"\x00\xff\xe9", "tree/empty.py": b"", "tree/notes.txt": b"text",
        "tree/sub/c.py": b"c", "tree/sub/test/d.py": b"d",
    }  # fmt: skip
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "tree"


def names(files: list[Path], tree: Path) -> list[str]:
    return [str(path.relative_to(tree)) for path in files]


def test_selection_is_sorted_unique_and_honours_include_and_skip(tree: Path) -> None:
    assert names(select_files([tree], ["*.py"], []), tree) == ["a.py", "b.py", "empty.py"]
    assert names(select_files([tree], ["*/**/*.py"], ["test"]), tree) == ["sub/c.py"]
    assert names(select_files([tree, tree / "b.py"], ["*.py", "**/*.py"], ["sub"]), tree) == [
        "a.py", "b.py", "empty.py",
    ]  # fmt: skip


def test_every_byte_is_a_token_and_every_file_ends_with_the_end_token(tree: Path, tmp_path: Path) -> None:
    corpus, made = build_corpus(tmp_path / "out/corpus", select_files([tree], ["*.py"], []))
    assert made
    assert (corpus.documents, corpus.tokens) == (2, 3 + 1 + 6 + 1)
    tokens = struct.unpack("<11H", (tmp_path / "out/corpus.bin").read_bytes())
    assert tokens == (0x00, 0xFF, 0xE9, END_OF_DOCUMENT, *b"b = 1\n", END_OF_DOCUMENT)


def test_an_unchanged_corpus_is_not_written_again_and_a_changed_one_is(tree: Path, tmp_path: Path) -> None:
    prefix, files = tmp_path / "corpus", select_files([tree], ["*.py"], [])
    build_corpus(prefix, files)
    written = (tmp_path / "corpus.bin").stat().st_mtime_ns
    assert build_corpus(prefix, files)[1] is False
    assert (tmp_path / "corpus.bin").stat().st_mtime_ns == written
    (tree / "b.py").write_bytes(b"b = 22\n")
    corpus, made = build_corpus(prefix, files)
    assert made
    assert corpus.tokens == 12


def test_an_interrupted_corpus_does_not_pass_for_a_finished_one(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, files = tmp_path / "corpus", select_files([tree], ["*.py"], [])
    build_corpus(prefix, files)
    os.utime(tree / "b.py", ns=(1, 1))

    def interrupted(path: Path) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "read_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_corpus(prefix, files)
    monkeypatch.undo()
    assert build_corpus(prefix, files)[1]


def test_command_says_what_it_did_and_what_is_wrong(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "c.v1"), str(tree), "--include", "*.py"]) == 0
    assert "2 documents, 11 tokens, written" in capsys.readouterr().out
    assert (tmp_path / "c.v1.bin").is_file()
    for arguments, message in (
        ([str(tree / "missing")], "no such file or folder"),
        ([str(tree), "--include", "*.md"], "0 files"),
        ([str(tree), "--include", "empty.py"], "none of them has any content"),
    ):
        with pytest.raises(SystemExit) as exit_code:
            main([str(tmp_path / "d"), *arguments])
        assert exit_code.value.code == 2
        assert message in capsys.readouterr().err


def test_megatron_reads_back_what_was_written(tree: Path, tmp_path: Path) -> None:
    files = select_files([tree], ["*.py"], [])
    build_corpus(tmp_path / "corpus", files)
    program = (
        "import json, sys, musa_titan; musa_titan.apply_pretrain_patch()\n"
        "from megatron.core.datasets.indexed_dataset import IndexedDataset\n"
        "data = IndexedDataset(sys.argv[1])\n"
        "print(json.dumps([[row.tolist() for row in data], data.document_indices.tolist(), str(data.index.dtype)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "corpus")], cwd=ROOT, capture_output=True, text=True,
        check=True, env={**os.environ, "ACCELERATOR_BACKEND": "cpu"},
    )  # fmt: skip
    rows, documents, dtype = json.loads(done.stdout.splitlines()[-1])
    assert rows == [[*content, END_OF_DOCUMENT] for content in (path.read_bytes() for path in files) if content]
    assert documents == [0, 1, 2]
    assert "uint16" in dtype
