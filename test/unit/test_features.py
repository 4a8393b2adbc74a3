"""Settings: one table, three sources."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import pytest

from musa_titan import features, settings
from musa_titan.features import FEATURES, Feature, all_options
from musa_titan.options import option
from musa_titan.patching.spec import MusaTitanError
from musa_titan.settings import (
    Settings,
    add_arguments,
    settings_from_arguments,
    settings_from_environment,
    validate,
)


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    enabled: bool = option(False, "Use the link.")
    transport: str = option("tcp", "How 100% of bytes go.", choices=("tcp", "rdma"))
    slots: int = option(4, "Slots.")
    timeout: float | None = option(None, "Seconds.")


@dataclass(frozen=True, kw_only=True)
class ModeOptions:
    mode: str = option("off", "Mode.", choices=("off", "fast"))


LINK = Feature(name="link", title="Link", options=LinkOptions, switch="enabled", needs=("mode",))
MODE = Feature(name="mode", title="Mode", options=ModeOptions, switch="mode", prefix="link_mode")


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real table and two features more."""
    for module in (features, settings):
        monkeypatch.setattr(module, "FEATURES", (*FEATURES, LINK, MODE))


def parse(*flags: str, environment: dict[str, str] | None = None) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return settings_from_arguments(parser.parse_args(flags), settings_from_environment(environment or {}))


def test_defaults() -> None:
    assert parse()["link"] == LinkOptions()
    assert not parse().enabled("link")
    assert not parse().enabled("mode")
    assert parse().enabled("runtime")


@pytest.mark.parametrize("text", ["1", "true", "On", "YES"])
def test_variables_turn_on_and_off(text: str) -> None:
    assert parse(environment={"MUSA_TITAN_LINK": text}).enabled("link")
    assert not parse(environment={"MUSA_TITAN_LINK": "no"}).enabled("link")


def test_values_have_their_types() -> None:
    found = settings_from_environment(
        {
            "MUSA_TITAN_LINK_TRANSPORT": "rdma",
            "MUSA_TITAN_LINK_SLOTS": "8",
            "MUSA_TITAN_LINK_TIMEOUT": "2.5",
            "MUSA_TITAN_LINK_MODE": "fast",
            "MUSA_TITAN_STRICT": "1",
            "UNRELATED": "x",
        }
    )
    assert found["link"] == LinkOptions(transport="rdma", slots=8, timeout=2.5)
    assert found.enabled("mode")
    assert found.strict


def test_flag_wins_over_variable_wins_over_default() -> None:
    environment = {"MUSA_TITAN_LINK": "1", "MUSA_TITAN_LINK_SLOTS": "8"}
    assert parse("--musa-link-slots", "16", environment=environment)["link"] == LinkOptions(enabled=True, slots=16)
    assert not parse("--no-musa-link", environment=environment).enabled("link")
    assert parse("--musa-link").enabled("link")


def test_each_flag_is_in_the_help_with_its_variable() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    shown = " ".join(parser.format_help().split())
    for feature, spec, _ in all_options():
        assert feature.flag(spec.name) in shown
        assert feature.variable(spec.name) in shown
    assert "100% of bytes" in shown


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("MUSA_TITAN_STRCIT", "MUSA_TITAN_STRICT"), ("MUSA_TITAN_LINK_SLOT", "MUSA_TITAN_LINK_SLOTS")],
)
def test_unknown_variable_suggests_the_nearest_name(name: str, nearest: str) -> None:
    with pytest.raises(MusaTitanError, match=rf"unknown environment variable {name}; did you mean {nearest}\?"):
        settings_from_environment({name: "1"})


def test_variables_of_other_readers_are_known() -> None:
    settings_from_environment(dict.fromkeys(features.OTHER_VARIABLES, "anything"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MUSA_TITAN_STRICT", "maybe", r"MUSA_TITAN_STRICT='maybe' is not a yes or no; use 1 or 0"),
        ("MUSA_TITAN_LINK_SLOTS", "many", r"MUSA_TITAN_LINK_SLOTS='many' is not an int"),
        ("MUSA_TITAN_LINK_TIMEOUT", "", r"MUSA_TITAN_LINK_TIMEOUT='' is not a float"),
        ("MUSA_TITAN_LINK_TRANSPORT", "pigeon", r"MUSA_TITAN_LINK_TRANSPORT='pigeon' is not one of tcp, rdma"),
    ],
)
def test_invalid_variables(name: str, value: str, message: str) -> None:
    with pytest.raises(MusaTitanError, match=message):
        settings_from_environment({name: value})


def test_invalid_flag_is_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--musa-link-transport", "pigeon")
    assert "invalid choice: 'pigeon'" in capsys.readouterr().err


def test_needs() -> None:
    with pytest.raises(MusaTitanError, match="Link needs mode, which is off"):
        validate(parse("--musa-link"), None)
    validate(parse("--musa-link", "--musa-link-mode", "fast"), None)
    validate(parse(), None)


def test_conflicts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (*FEATURES, replace(LINK, needs=(), conflicts=("mode",)), MODE)
    for module in (features, settings):
        monkeypatch.setattr(module, "FEATURES", rows)
    with pytest.raises(MusaTitanError, match="Link and Mode cannot be on together; turn one off"):
        validate(parse("--musa-link", "--musa-link-mode", "fast"), None)
    validate(parse("--musa-link"), None)


def refuse_many_slots(found: Settings, args: object) -> None:
    if found["link"].slots > 8:
        raise MusaTitanError(f"{args}: too many slots")


def test_own_validation_runs_only_when_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (*FEATURES, replace(LINK, needs=(), validate="test.unit.test_features:refuse_many_slots"), MODE)
    for module in (features, settings):
        monkeypatch.setattr(module, "FEATURES", rows)
    validate(parse("--musa-link-slots", "9"), "args")
    with pytest.raises(MusaTitanError, match="args: too many slots"):
        validate(parse("--musa-link", "--musa-link-slots", "9"), "args")


def test_unknown_feature_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="nothing"):
        parse().enabled("nothing")


def test_names_of_flags_and_variables_are_unique() -> None:
    options = list(all_options())
    assert len({feature.flag(spec.name) for feature, spec, _ in options}) == len(options)
    assert len({feature.variable(spec.name) for feature, spec, _ in options}) == len(options)


def test_what_belongs_to_a_node_is_not_compared_between_nodes() -> None:
    own = {"MUSA_TITAN_REPORT_DIR": "reports", "MUSA_TITAN_P2P_HOST": "eth1", "MUSA_TITAN_P2P_DEVICES": "mlx5_0"}
    assert settings_from_environment({}).shared() == settings_from_environment(own).shared() == {}
    assert settings_from_environment({"MUSA_TITAN_P2P_SLOTS": "4"}).shared() == {"p2p.slots": "4"}
