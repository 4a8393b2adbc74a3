"""What happens when upstream's definitions are not those that were checked; and the committed lock file."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path

import pytest

from musa_titan.doctor.upstreams import all_patches, installed_root, installed_upstream
from musa_titan.patching.fingerprint import SourceFile
from musa_titan.patching.lock import LOCK_FILE, Lock, lock_content, shapes_in
from musa_titan.patching.spec import MusaTitanError, PatchError
from musa_titan.patching.static import open_tree, shapes_of
from musa_titan.pretrain.upstream import megatron_version
from test.unit.patching.synthetic import FakeSettings, Upstream, patch

RELEASES = Path(__file__).parents[3] / ".cache" / "megatron"

CHECKED = """
def f(x, scale=1):
    return x * scale

def g(x):
    return x
"""
MOVED_ON = CHECKED.replace("x * scale", "scale * x").replace("return x\n", "return +x\n")
OTHER_SIGNATURE = CHECKED.replace("f(x, scale=1)", "f(x, factor=1)").replace("x * scale", "x * factor")


def lock_of(text: str) -> Lock:
    source = SourceFile(text)
    shapes = {}
    for name in ("f", "g"):
        definition = source.find(name)
        assert definition is not None
        shapes[f"upstream.a:{name}"] = (definition.body, definition.signature)
    content = lock_content({"1.0": shapes, "1.1": shapes})
    return Lock(content["targets"], content["releases"])


def load() -> None:
    importlib.import_module("upstream.a")


def test_known_body_is_silent(upstream: Upstream, caplog: pytest.LogCaptureFixture) -> None:
    upstream.write(a="# a comment\n" + CHECKED)
    engine = upstream.engine(patch("p", "upstream.a:f"), lock=lock_of(CHECKED))
    load()
    engine.configure(FakeSettings(strict=True))
    assert engine.report()["p"].status == "applied"
    assert caplog.records == []


def test_unknown_bodies_give_one_warning_that_names_all(upstream: Upstream, caplog: pytest.LogCaptureFixture) -> None:
    upstream.write(a=MOVED_ON)
    engine = upstream.engine(patch("p", "upstream.a:f"), patch("q", "upstream.a:g"), lock=lock_of(CHECKED))
    load()
    with caplog.at_level(logging.WARNING):
        engine.configure(FakeSettings())
    assert [engine.report()[id].status for id in ("p", "q")] == ["drifted", "drifted"]
    assert len(caplog.records) == 1
    for part in ("2 patched definitions", "upstream.a:f", "upstream.a:g", "1.0, 1.1"):
        assert part in caplog.text


def test_unknown_body_is_an_error_under_strict(upstream: Upstream) -> None:
    upstream.write(a=MOVED_ON)
    engine = upstream.engine(patch("p", "upstream.a:f"), lock=lock_of(CHECKED))
    load()
    with pytest.raises(MusaTitanError, match=r"upstream\.a:f.*Use a checked release"):
        engine.configure(FakeSettings(strict=True))


def test_replace_refuses_an_unknown_signature(upstream: Upstream) -> None:
    upstream.write(a=OTHER_SIGNATURE)
    engine = upstream.engine(
        patch("p.id", "upstream.a:f", make="replace_with_forty", kind="replace"), lock=lock_of(CHECKED)
    )
    with pytest.raises(PatchError) as error:
        load()
    for part in ("p.id", "upstream.a:f", "1.2.3", "(x, factor=1)", "doctor --upstream"):
        assert part in str(error.value)
    assert engine.report()["p.id"].status == "failed"


def test_replace_accepts_a_known_signature_with_a_warning(upstream: Upstream) -> None:
    upstream.write(a=MOVED_ON)
    engine = upstream.engine(
        patch("p", "upstream.a:f", make="replace_with_forty", kind="replace"), lock=lock_of(CHECKED)
    )
    load()
    assert engine.report()["p"].status == "drifted"


def test_wrap_refuses_when_a_parameter_it_names_is_gone(upstream: Upstream) -> None:
    upstream.write(a=OTHER_SIGNATURE)
    upstream.engine(patch("p.id", "upstream.a:f", parameters=("x", "scale")), lock=lock_of(CHECKED))
    with pytest.raises(PatchError, match=r"p\.id on upstream\.a:f in megatron-core 1\.2\.3: .*without scale"):
        load()


def test_wrap_that_names_no_parameter_accepts_any_signature(upstream: Upstream) -> None:
    upstream.write(a=OTHER_SIGNATURE)
    engine = upstream.engine(patch("p", "upstream.a:f", parameters=("x",)), lock=lock_of(CHECKED))
    load()
    assert engine.report()["p"].status == "drifted"


def test_lock_content_is_the_inverse_of_shapes() -> None:
    content = json.loads(LOCK_FILE.read_text())
    assert lock_content(shapes_in(content)) == content


def test_lock_file_knows_every_patched_definition_of_the_installed_megatron() -> None:
    findings = installed_upstream().findings(all_patches(), Lock.read())
    wrong = [f for f in findings if f.state not in ("known", "present", "absent", "other version", "elsewhere")]
    assert wrong == []
    assert any(f.state == "known" for f in findings)


def test_lock_file_has_no_target_that_no_patch_has() -> None:
    assert set(json.loads(LOCK_FILE.read_text())["targets"]) <= {patch.target for patch in all_patches()}


@pytest.mark.parametrize("release", json.loads(LOCK_FILE.read_text())["releases"])
def test_lock_file_is_what_the_release_gives(release: str) -> None:
    place = RELEASES / release
    if release == megatron_version():
        place = installed_root()
    if not place.is_dir():
        pytest.skip(f"megatron-core {release} is not in .cache/megatron; `bash test/run.sh` unpacks it")
    known = shapes_in(json.loads(LOCK_FILE.read_text()))[release]
    assert shapes_of(all_patches(), open_tree(place, "megatron.core")) == known
