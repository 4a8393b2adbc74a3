"""Configuration, provisional patches, retiring and taking back."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from musa_titan.patching.spec import PatchError
from test.unit.patching.synthetic import MODULE, FakeSettings, Upstream, load, patch


def test_configured_phase_and_provisional(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    patches = (
        patch("core", "upstream.a:f", make="wrap_add_one"),
        patch("later", "upstream.a:f", make="wrap_double", feature="x", phase="configured", layer="observe"),
        patch("prov", "upstream.a:Outer.static", feature="y", provisional=True),
    )
    engine = upstream.engine(*patches)
    a = load("a")
    assert (a.f(3), a.Outer.static(1)) == (4, 2)
    engine.configure(FakeSettings(on=frozenset({"x"})))
    assert (a.f(3), a.Outer.static(1)) == (8, 1)
    assert engine.report()["prov"].status == "skipped"
    engine.configure(FakeSettings(on=frozenset({"y"})))
    assert (a.f(3), a.Outer.static(1)) == (4, 2)


def test_configure_twice_does_not_wrap_twice(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    engine = upstream.engine(patch("p", "upstream.a:f"))
    a = load("a")
    patched = a.f
    for _ in range(3):
        engine.configure(FakeSettings())
    assert a.f is patched


def test_retire_takes_back_one_hook(upstream: Upstream) -> None:
    upstream.write(a=MODULE, b="from upstream.a import f\n")
    engine = upstream.engine(patch("p", "upstream.a:f"), patch("q", "upstream.a:Outer.static"))
    load("b")
    engine.retire("p")
    assert load("a").f(1) == load("b").f(1) == 1
    engine.configure(FakeSettings())
    assert load("a").f(1) == 1
    assert load("a").Outer.static(1) == 2


def test_retire_leaves_other_patches_of_the_same_target(upstream: Upstream) -> None:
    upstream.write(a=MODULE, b="from upstream.a import f\n")
    engine = upstream.engine(patch("p", "upstream.a:f"), patch("q", "upstream.a:f", make="wrap_double"))
    load("b")
    engine.retire("p")
    assert load("a").f(3) == load("b").f(3) == 6


def test_unapply_leaves_foreign_writes_and_names_them(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    engine = upstream.engine(patch("p", "upstream.a:f"))
    a = load("a")

    def foreign(x: int) -> int:
        return x

    a.f = foreign
    assert engine.unapply() == ["upstream.a.f"]
    assert a.f is foreign


def test_foreign_overwrite_is_refused_at_configuration(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    engine = upstream.engine(
        patch("p", "upstream.a:f"),
        patch("q", "upstream.a:f", feature="x", phase="configured", make="wrap_double"),
    )
    a = load("a")
    inner = a.f
    a.f = lambda x: inner(x)
    engine.configure(FakeSettings())
    assert a.f(3) == 4  # nothing to change: our wrap stays inside the foreign one
    with pytest.raises(
        PatchError, match=r"upstream\.a\.f was overwritten by other code after musa_titan had patched it"
    ):
        engine.configure(FakeSettings(on=frozenset({"x"})))


TARGETS = [
    "upstream.a:f",
    "upstream.a:Outer.static",
    "upstream.a:Outer.klass",
    "upstream.a:Outer.Inner.method",
    "upstream.b:g",
]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chosen=st.lists(st.tuples(st.sampled_from(TARGETS), st.sampled_from(["wrap_add_one", "wrap_double"])), max_size=6)
)
def test_unapply_after_apply_is_the_identity(upstream: Upstream, chosen: list[tuple[str, str]]) -> None:
    upstream.write(a=MODULE, b="from upstream.a import f, Outer as Renamed\ng = f\n\ndef g(x):\n    return x\n")
    a, b = load("a"), load("b")

    def snapshot() -> list[dict[str, int]]:
        return [{k: id(v) for k, v in vars(owner).items()} for owner in (a, b, a.Outer, a.Outer.Inner, a.Child)]

    before = snapshot()
    engine = upstream.engine(*[patch(f"p{i}", target, make=make) for i, (target, make) in enumerate(chosen)])
    if chosen:
        assert snapshot() != before
    assert engine.unapply() == []
    assert snapshot() == before
