"""Settings of one process: options of every feature from flags, environment and defaults.

A flag wins over the variable, the variable over the default. Once Megatron's arguments are validated they are frozen.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from musa_titan.features import FEATURES, OTHER_VARIABLES, all_options
from musa_titan.patching.profile import load_by_name
from musa_titan.patching.spec import MusaTitanError

YES = frozenset({"1", "true", "on", "yes"})
NO = frozenset({"0", "false", "off", "no"})


@dataclass(frozen=True)
class Settings:
    """Frozen options of every feature: ``settings["runtime"].strict``."""

    options: Mapping[str, Any]

    def __getitem__(self, feature: str) -> Any:
        return self.options[feature]

    @property
    def strict(self) -> bool:
        return bool(self.options["runtime"].strict)

    @property
    def show_traceback(self) -> bool:
        return bool(self.options["runtime"].traceback)

    def shared(self) -> dict[str, str]:
        """What all ranks must have alike: ``feature.option`` -> its value, of options that are not at their default."""
        return {
            f"{feature.name}.{spec.name}": str(value)
            for feature, spec, _ in all_options()
            if not spec.metadata["per_node"] and (value := getattr(self[feature.name], spec.name)) != spec.default
        }

    def enabled(self, feature: str) -> bool:
        """Whether `feature` is on. Raises KeyError for a name that is not in the table."""
        row = next(row for row in FEATURES if row.name == feature) if feature in self.options else None
        if row is None:
            raise KeyError(f"no feature is called {feature}")
        return row.switch is None or getattr(self.options[feature], row.switch) not in (False, None, "off", "default")


def settings_from_environment(environment: Mapping[str, str]) -> Settings:
    """Options from ``MUSA_TITAN_*`` and defaults.

    Raises:
        MusaTitanError: an unknown variable with our prefix (the nearest known name is suggested), or a bad value.
    """
    _refuse_unknown(environment)
    found: dict[str, dict[str, Any]] = {feature.name: {} for feature in FEATURES}
    for feature, spec, kind in all_options():
        variable = feature.variable(spec.name)
        if variable in environment:
            found[feature.name][spec.name] = _parse(environment[variable], kind, spec, variable)
    return Settings({feature.name: feature.options(**found[feature.name]) for feature in FEATURES})


def settings_from_arguments(args: argparse.Namespace, base: Settings) -> Settings:
    """`base` overridden by the flags that were given."""
    options: dict[str, Any] = {}
    for feature in FEATURES:
        names = [spec.name for spec in dataclasses.fields(feature.options)]
        given = {name: getattr(args, feature.destination(name), None) for name in names}
        options[feature.name] = dataclasses.replace(
            base[feature.name], **{name: value for name, value in given.items() if value is not None}
        )
    return Settings(options)


def validate(settings: Settings, args: Any) -> None:
    """Check needs, conflicts and each enabled feature's own rules against Megatron's validated `args`.

    Raises:
        MusaTitanError: with the flag to change.
    """
    enabled = {feature.name: feature for feature in FEATURES if settings.enabled(feature.name)}
    for feature in enabled.values():
        for other in feature.needs:
            if other not in enabled:
                raise MusaTitanError(f"{feature.title} needs {other}, which is off")
        for other in feature.conflicts:
            if other in enabled:
                raise MusaTitanError(f"{feature.title} and {enabled[other].title} cannot be on together; turn one off")
        if feature.validate:
            load_by_name(feature.validate)(settings, args)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one argument group with the flags of every feature. Their default is None: not given."""
    group = parser.add_argument_group(title="musa_titan")
    for feature, spec, kind in all_options():
        help_text = f"{spec.metadata['help']} Default: {spec.default}. Variable: {feature.variable(spec.name)}."
        common: dict[str, Any] = {"default": None, "help": help_text.replace("%", "%%")}
        common["dest"] = feature.destination(spec.name)
        if kind is bool:
            group.add_argument(feature.flag(spec.name), action=argparse.BooleanOptionalAction, **common)
        else:
            group.add_argument(feature.flag(spec.name), type=kind, choices=spec.metadata["choices"], **common)


def _parse(text: str, kind: type, spec: dataclasses.Field[Any], variable: str) -> Any:
    choices = spec.metadata["choices"]
    if kind is bool:
        if text.lower() not in YES | NO:
            raise MusaTitanError(f"{variable}={text!r} is not a yes or no; use 1 or 0")
        return text.lower() in YES
    try:
        value = kind(text)
    except ValueError:
        raise MusaTitanError(f"{variable}={text!r} is not {_article(kind.__name__)}") from None
    if choices is not None and value not in choices:
        raise MusaTitanError(f"{variable}={text!r} is not one of {', '.join(map(str, choices))}")
    return value


def _refuse_unknown(environment: Mapping[str, str]) -> None:
    known = {feature.variable(spec.name) for feature, spec, _ in all_options()} | set(OTHER_VARIABLES)
    for name in sorted(environment):
        if name.startswith("MUSA_TITAN_") and name not in known:
            nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
            raise MusaTitanError(f"unknown environment variable {name}; did you mean {nearest}?")


def _article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"
