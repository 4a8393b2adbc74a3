"""Factories of the entry hooks (``pretrain/entry.py``)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from musa_titan.patching import boot
from musa_titan.patching.digest import compare_ranks
from musa_titan.patching.engine import Engine
from musa_titan.patching.spec import Context, MusaTitanError
from musa_titan.settings import Settings, add_arguments, settings_from_arguments, validate


def add_our_arguments(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Megatron's parser, and then ours: one argument group with every feature's flags."""

    def add_megatron_arguments(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        parser = current(parser, *args, **kwargs)
        add_arguments(parser)
        return parser

    return add_megatron_arguments


def configure_after_validation(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Megatron's validation, then ours; afterwards the settings are frozen and ``configured`` patches apply."""

    def validate_args(args: argparse.Namespace, *more: Any, **kwargs: Any) -> Any:
        validated = current(args, *more, **kwargs)
        configure_once(args, context.settings)
        return validated

    return validate_args


def configure_once(args: argparse.Namespace, base: Settings) -> None:
    """Freeze the settings that validated `args` ask for over `base`, and apply what waited for them.

    Raises:
        MusaTitanError: a rule of a feature is broken, or this process was configured with other flags before.
    """
    engine = _engine()
    settings = settings_from_arguments(args, base)
    validate(settings, args)
    if engine.configured and settings != engine.settings:
        raise MusaTitanError("Megatron's arguments were validated twice with different --musa-… flags")
    _configure(engine, settings)


def check_ranks_before_groups(current: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Compare all ranks once, when ``torch.distributed`` is up and before the first process group is made."""
    compared = False

    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        nonlocal compared
        if compared:  # through a name that another module imported before this was taken back
            return current(*args, **kwargs)
        engine = _engine()
        if not engine.configured:  # a program that uses megatron.core without megatron.training's arguments
            _configure(engine, context.settings)
        engine.retire("entry.distributed")
        compare_ranks(engine, wanted=engine.settings["runtime"].rank_check)  # type: ignore[index]
        compared = True
        return current(*args, **kwargs)

    return initialize_model_parallel


def _configure(engine: Engine, settings: Settings) -> None:
    engine.configure(settings)
    report = engine.report()
    if int(os.environ.get("RANK", "0")) == 0:
        print(report.summary(), flush=True)
    if settings["runtime"].report_dir:
        report.write(settings["runtime"].report_dir)


def _engine() -> Engine:
    if boot.watcher is None or boot.watcher.engine is None:
        raise MusaTitanError("the patch engine was taken back by unapply() while Megatron still used its hooks")
    return boot.watcher.engine
