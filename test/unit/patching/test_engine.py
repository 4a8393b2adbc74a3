"""What the engine promises, on synthetic packages."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pickle
import sys
import threading

import pytest

from musa_titan.patching.profile import check_conflicts
from musa_titan.patching.spec import MusaTitanError, PatchError
from test.unit.patching.synthetic import MODULE, FakeSettings, Upstream, load, patch


def test_function_is_patched_before_a_consumer_imports_it_by_name(upstream: Upstream) -> None:
    upstream.write(a=MODULE, b="from upstream.a import f\n")
    engine = upstream.engine(patch("p", "upstream.a:f"))
    assert engine.report()["p"].status == "pending"
    assert load("b").f(1) == 2
    assert engine.report()["p"].status == "applied"


def test_nested_attribute(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    upstream.engine(patch("p", "upstream.a:Outer.Inner.method"))
    assert load("a").Outer.Inner().method(1) == 2


def test_descriptors_stay_what_they_are(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    upstream.engine(patch("s", "upstream.a:Outer.static"), patch("c", "upstream.a:Outer.klass"))
    outer = load("a").Outer
    assert isinstance(inspect.getattr_static(outer, "static"), staticmethod)
    assert isinstance(inspect.getattr_static(outer, "klass"), classmethod)
    assert outer.static(1) == outer().static(1) == 2
    assert outer.klass(1) == 2


def test_inherited_member_is_overridden_on_the_named_class_only(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    engine = upstream.engine(patch("p", "upstream.a:Child.static"))
    a = load("a")
    assert (a.Child.static(1), a.Outer.static(1)) == (2, 1)
    engine.unapply()
    assert "static" not in vars(a.Child)
    assert a.Child.static(1) == 1


def test_wraps_stack_by_layer_then_after_then_id(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    upstream.engine(
        patch("z.inner", "upstream.a:f", make="wrap_add_one", layer="compat"),
        patch("a.outer", "upstream.a:f", make="wrap_double", layer="observe"),
    )
    assert load("a").f(3) == (3 + 1) * 2


def test_after_puts_a_wrap_outside(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    upstream.engine(
        patch("a.first_by_id", "upstream.a:f", make="wrap_double", after=("b.inner",)),
        patch("b.inner", "upstream.a:f", make="wrap_add_one"),
    )
    assert load("a").f(3) == (3 + 1) * 2


def test_wrap_goes_around_a_replacement(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    upstream.engine(
        patch("w", "upstream.a:f", make="wrap_add_one"),
        patch("r", "upstream.a:f", make="replace_with_forty", kind="replace"),
    )
    assert load("a").f(3) == 41


def test_two_replacements_of_one_target_are_a_conflict_that_names_both() -> None:
    with pytest.raises(MusaTitanError, match=r"one\.id and two\.id both replace upstream\.a:f"):
        check_conflicts(
            (patch("one.id", "upstream.a:f", kind="replace"), patch("two.id", "upstream.a:f", kind="replace"))
        )
    with pytest.raises(MusaTitanError, match=r"two patches are called same"):
        check_conflicts((patch("same", "upstream.a:f"), patch("same", "upstream.a:g")))


def test_add_creates_and_unapply_removes(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    engine = upstream.engine(patch("p", "upstream.a:SEVEN", make="number_seven", kind="add"))
    assert load("a").SEVEN == 7
    engine.unapply()
    assert not hasattr(load("a"), "SEVEN")


def test_reload_patches_again_and_once(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    upstream.engine(patch("p", "upstream.a:f"))
    a = load("a")
    importlib.reload(a)
    assert a.f(1) == 2


def test_lazy_module_is_patched_when_it_really_loads(upstream: Upstream) -> None:
    upstream.write(a=MODULE + "\nLOADED = True\n", other="")
    engine = upstream.engine(patch("p", "upstream.a:f"))
    spec = importlib.util.find_spec("upstream.a")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["upstream.a"] = module
    spec.loader.exec_module(module)
    load("other")
    engine.configure(FakeSettings())
    assert engine.report()["p"].status == "pending"
    assert module.f(1) == 2
    assert engine.report()["p"].status == "applied"


def test_namespace_package_child(upstream: Upstream) -> None:
    upstream.write(space__deep__a=MODULE)
    upstream.engine(patch("p", "upstream.space.deep.a:f"))
    assert load("space.deep.a").f(1) == 2


def test_alias_captured_through_a_circular_import_is_rebound(upstream: Upstream) -> None:
    upstream.write(
        a="def f(x):\n    return x\n\nimport upstream.b\n",
        b="from upstream.a import f as renamed\n",
    )
    engine = upstream.engine(patch("p", "upstream.a:f"))
    load("a")
    assert load("b").renamed(1) == 2
    engine.unapply()
    assert load("b").renamed(1) == load("a").f(1) == 1


def test_four_threads_importing_see_only_the_patched_function(upstream: Upstream) -> None:
    upstream.write(
        a="import time\ntime.sleep(0.05)\n" + MODULE, **{f"c{i}": "from upstream.a import f\n" for i in range(4)}
    )
    upstream.engine(patch("p", "upstream.a:f"))
    results: list[int] = []
    threads = [threading.Thread(target=lambda i=i: results.append(load(f"c{i}").f(1))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert results == [2, 2, 2, 2]


def test_late_application_rebinds_aliases_and_says_late(upstream: Upstream, caplog: pytest.LogCaptureFixture) -> None:
    upstream.write(a=MODULE, b="from upstream.a import f as g\n")
    b = load("b")
    engine = upstream.engine(patch("p", "upstream.a:f"))
    assert b.g(1) == 2
    assert engine.report()["p"].status == "late"
    assert "1 module was imported before apply_pretrain_patch(): upstream.a." in caplog.text


def test_a_module_that_has_executed_is_not_executed_differently_any_more(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    load("a")
    engine = upstream.engine(patch("around", "upstream.a", kind="around_import"))
    assert engine.report()["around"].status == "skipped"
    assert engine.report()["around"].detail == "its module was imported before"


def test_late_application_is_refused_under_strict(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    load("a")
    with pytest.raises(MusaTitanError, match=r"upstream\.a was imported before apply_pretrain_patch"):
        upstream.engine(patch("p", "upstream.a:f"), settings=FakeSettings(strict=True))


def test_failing_factory_leaves_the_target_as_it_was_and_names_everything(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    engine = upstream.engine(
        patch("good", "upstream.a:f"), patch("bad", "upstream.a:f", make="explode", layer="observe")
    )
    with pytest.raises(
        PatchError, match=r"patch bad on upstream\.a:f in megatron-core 1\.2\.3: ValueError: factory went"
    ):
        load("a")
    assert engine.report()["bad"].status == "failed"
    for watcher in upstream.watchers:
        watcher.names = frozenset()
    assert load("a").f(1) == 1


def test_failure_is_not_an_import_error(upstream: Upstream) -> None:
    upstream.write(a=MODULE, guarded="try:\n    import upstream.a\nexcept ImportError:\n    HAVE_A = False\n")
    upstream.engine(patch("bad", "upstream.a:f", make="explode"))
    with pytest.raises(PatchError):
        load("guarded")


def test_missing_target_names_id_target_version_and_remedy(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    upstream.engine(patch("p.id", "upstream.a:gone"))
    with pytest.raises(PatchError) as error:
        load("a")
    for part in ("p.id", "upstream.a:gone", "1.2.3", "doctor --upstream"):
        assert part in str(error.value)


def test_optional_target_may_be_missing(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    engine = upstream.engine(patch("p", "upstream.a:gone", required=False))
    load("a")
    assert (engine.report()["p"].status, engine.report()["p"].detail) == ("skipped", "this release has no such name")


def test_skip_and_version_reasons_are_reported(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    engine = upstream.engine(
        patch("s", "upstream.a:f", make="skip"), patch("v", "upstream.a:Outer.static", versions=("2.0", None))
    )
    original = load("a").f
    assert original.__module__ == "upstream.a"
    assert not hasattr(original, "__wrapped__")
    assert engine.report()["s"].detail == "nothing to do here"
    assert "from 2.0" in engine.report()["v"].detail


def test_a_patch_for_some_versions_is_not_applied_to_an_unknown_one(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    upstream.version = ""
    engine = upstream.engine(patch("v", "upstream.a:f", versions=(None, "9")))
    load("a")
    assert engine.report()["v"].status == "skipped"


def test_patched_function_pickles_by_name_and_keeps_its_identity(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    upstream.engine(patch("p", "upstream.a:f"))
    f = load("a").f
    assert pickle.loads(pickle.dumps(f)) is f
    assert f.__qualname__ == "f"
    assert inspect.signature(f) == inspect.signature(f.__wrapped__)


def test_loader_and_source_stay_the_real_ones(upstream: Upstream) -> None:
    upstream.write(a=MODULE)
    upstream.engine(patch("p", "upstream.a:f"))
    a = load("a")
    assert type(a.__loader__).__name__ == "SourceFileLoader"
    assert a.__spec__.loader is a.__loader__
    assert "class Outer" in inspect.getsource(a)


def test_around_import_and_hook(upstream: Upstream) -> None:
    upstream.write(a="import factories\nSEEN = factories.INSIDE\nX = 1\n")
    upstream.factories(
        """
        import contextlib
        INSIDE = False
        @contextlib.contextmanager
        def around(context):
            global INSIDE
            INSIDE = True
            yield
            INSIDE = False
        def hook(module, context, journal):
            journal.set(module, "X", 2)
        """
    )
    engine = upstream.engine(
        patch("around", "upstream.a", make="around", kind="around_import"),
        patch("hook", "upstream.a", make="hook", kind="hook"),
    )
    a = load("a")
    assert (a.SEEN, a.X, importlib.import_module("factories").INSIDE) == (True, 2, False)
    assert [record.status for record in engine.report().records] == ["applied", "applied"]
    importlib.reload(a)
    assert a.X == 2
    engine.unapply()
    assert a.X == 1
