"""The one table of features and their options.

From it come the command-line flags (``--musa-…``, added to Megatron's own parser), the environment variables
(``MUSA_TITAN_…``), validation, the option tables in ``docs/features`` and the digest that ranks compare. An option is
declared once, as a field of its feature's dataclass; a flag wins over the variable, the variable over the default.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from musa_titan.patching.spec import MusaTitanError

OTHER_VARIABLES = {
    "MUSA_TITAN_PATH": "directory of this checkout, read by slime's accelerator start-up",
    "MUSA_TITAN_TEST_CACHE": "where the tests keep compiled doubles",
}
"""Variables with our prefix that are not options."""

YES = frozenset({"1", "true", "on", "yes"})
NO = frozenset({"0", "false", "off", "no"})


def option(default: Any, help: str, *, choices: tuple[Any, ...] | None = None) -> Any:
    """A dataclass field that is also a flag and an environment variable."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """How the adapter itself behaves."""

    strict: bool = option(
        False, "Treat an unknown upstream definition or a late call as an error instead of a warning."
    )
    rank_check: bool = option(
        True,
        "At distributed initialisation compare patches, settings and package content; stop if a rank differs.",
    )
    report_dir: str | None = option(
        None, "Write what was done to each patch into this directory, one JSON file a process."
    )
    traceback: bool = option(False, "Show the Python traceback of an error that is otherwise reported in one line.")


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A row of the table."""

    name: str
    """Key of ``Settings``; the middle of flags and variables (``--musa-<name>-…``) unless `prefix` says otherwise."""
    title: str
    options: type
    """Frozen dataclass whose fields are made with :func:`option`."""
    prefix: str | None = None
    switch: str | None = None
    """The option that turns it on when it is neither False, None nor ``"off"``; None: always on."""
    needs: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    page: str = ""
    """File under ``docs/features``."""
    validate: Callable[[Any, Any], None] | None = None
    """``validate(options, megatron_args)`` raises MusaTitanError; called only when the feature is on."""

    def flag(self, name: str) -> str:
        return "--musa-" + "-".join(part for part in (self._prefix, name) if part).replace("_", "-")

    def variable(self, name: str) -> str:
        return "MUSA_TITAN_" + "_".join(part for part in (self._prefix, name) if part).upper()

    @property
    def _prefix(self) -> str:
        return self.name if self.prefix is None else self.prefix


FEATURES: tuple[Feature, ...] = (Feature(name="runtime", title="Adapter behaviour", options=RuntimeOptions, prefix=""),)


@dataclass(frozen=True)
class Settings:
    """Frozen options of every feature: ``settings["runtime"].strict``."""

    options: Mapping[str, Any]

    def __getitem__(self, feature: str) -> Any:
        return self.options[feature]

    @property
    def strict(self) -> bool:
        return bool(self.options["runtime"].strict)

    def enabled(self, feature: str) -> bool:
        """Whether `feature` is on. Raises KeyError for a name that is not in the table."""
        row = next(row for row in FEATURES if row.name == feature) if feature in self.options else None
        if row is None:
            raise KeyError(f"no feature is called {feature}")
        return row.switch is None or getattr(self.options[feature], row.switch) not in (False, None, "off")


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
        given = {name: getattr(args, destination(feature, name), None) for name in names}
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
        if feature.validate is not None:
            feature.validate(settings[feature.name], args)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one argument group with the flags of every feature. Their default is None: not given."""
    group = parser.add_argument_group(title="musa_titan")
    for feature, spec, kind in all_options():
        help_text = f"{spec.metadata['help']} Default: {spec.default}. Variable: {feature.variable(spec.name)}."
        common: dict[str, Any] = {"default": None, "help": help_text.replace("%", "%%")}
        common["dest"] = destination(feature, spec.name)
        if kind is bool:
            group.add_argument(feature.flag(spec.name), action=argparse.BooleanOptionalAction, **common)
        else:
            group.add_argument(feature.flag(spec.name), type=kind, choices=spec.metadata["choices"], **common)


def destination(feature: Feature, name: str) -> str:
    """Attribute of the parsed arguments that holds an option."""
    return feature.flag(name)[2:].replace("-", "_")


def all_options() -> Iterator[tuple[Feature, dataclasses.Field[Any], type]]:
    """(feature, field, type of its value) in table order; an optional ``T | None`` yields T."""
    for feature in FEATURES:
        hints = typing.get_type_hints(feature.options)
        for spec in dataclasses.fields(feature.options):
            kinds = [kind for kind in typing.get_args(hints[spec.name]) if kind is not type(None)]
            yield feature, spec, kinds[0] if kinds else hints[spec.name]


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
