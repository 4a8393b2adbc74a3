"""Applies patches as their target modules execute, and again once the settings are final.

Threads: a module executes under its own import lock, which serialises the work on its targets; no lock of ours is held
while a factory runs, since factories import modules.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, is_dataclass, replace
from types import ModuleType
from typing import Any

from musa_titan.accelerator.interface import Accelerator
from musa_titan.patching.fingerprint import SourceFile
from musa_titan.patching.journal import MISSING, Journal
from musa_titan.patching.lock import Lock, drift_of
from musa_titan.patching.profile import Profile, load_by_name
from musa_titan.patching.report import Record, Report
from musa_titan.patching.spec import Context, MusaTitanError, Patch, PatchError, PatchSettings, Skip, version_in_range
from musa_titan.patching.target import Target, dress, rebind, stacking_order, unwrap_descriptor

logger = logging.getLogger("musa_titan")


class Engine:
    """The patches of one profile in one process."""

    def __init__(
        self,
        profile: Profile,
        patches: tuple[Patch, ...],
        settings: PatchSettings,
        accelerator: Accelerator,
        lock: Lock,
    ) -> None:
        self.profile = profile
        self.patches = patches
        self.settings = settings
        self.configured = False
        self.records = {patch.id: Record(patch.id, patch.target, patch.feature) for patch in patches}
        self._accelerator = accelerator
        self._lock = lock
        self._sources: dict[str, SourceFile] = {}
        self._hooks: dict[str, Journal] = {}
        self.process_journal = Journal()
        self._targets: dict[str, Target] = {}
        self._order: list[Target] = []
        by_target: dict[str, list[Patch]] = {}
        for patch in patches:
            if patch.attribute:
                by_target.setdefault(patch.target, []).append(patch)
        for name, stack in by_target.items():
            self._targets[name] = Target(tuple(stacking_order(stack)))
        self.modules = frozenset(patch.module for patch in patches)

    # -- what the import watcher calls ------------------------------------------------------------------------------

    @contextmanager
    def executing(self, module: ModuleType) -> Iterator[None]:
        """Surrounds the execution of `module`, then patches it."""
        with ExitStack() as stack:
            for patch in self._of_module(module.__name__, "around_import"):
                if self._skip_reason(patch) is None:
                    stack.enter_context(load_by_name(patch.make)(self._context()))
                    self._settle(patch, "applied")
            already = len(sys.modules)
            yield
        # Modules that a circular import loaded meanwhile may hold the originals.
        self._module_loaded(module, list(sys.modules.values())[already:], fresh=True)

    def apply_to_loaded(self) -> None:
        """Patch modules that were imported before the engine started, and say so."""
        late = [name for name in sorted(self.modules) if _is_complete(sys.modules.get(name))]
        upstream = [name for name in late if name.startswith(self.profile.prefixes)]
        if upstream and self.settings.strict:
            raise MusaTitanError(
                f"{', '.join(upstream)} was imported before apply_{self.profile.name}_patch(), and strict mode is on. "
                "Move the call above the first import of the framework"
            )
        for name in late:
            for patch in self._of_module(name, "around_import"):
                if self._skip_reason(patch) is None:
                    self._settle(patch, "skipped", "its module was imported before")
            self._module_loaded(sys.modules[name], self._prefixed_modules(), late=name in upstream)
        if upstream:
            logger.warning(
                "musa_titan: %s imported before apply_%s_patch(): %s. Names bound elsewhere were exchanged; what a "
                "decorator or default argument took from them was not. Move the call above the first import",
                "1 module was" if len(upstream) == 1 else f"{len(upstream)} modules were",
                self.profile.name,
                ", ".join(upstream[:4]) + (", …" if len(upstream) > 4 else ""),
            )

    def configure(self, settings: PatchSettings) -> None:
        """Apply what waited for the final settings, take back what was provisional, and rebind remaining aliases."""
        self.settings = settings
        self.configured = True
        modules = self._prefixed_modules()
        for name in sorted(self.modules):
            if _is_complete(sys.modules.get(name)):
                self._module_loaded(sys.modules[name], modules)
        for target in self._order:
            target.rebind_aliases(modules)
        self._warn_of_drift()

    # -- what the user sees -----------------------------------------------------------------------------------------

    def report(self) -> Report:
        settings: dict[str, Any] = asdict(self.settings) if is_dataclass(self.settings) else {}
        return Report(
            self.profile.name,
            self._accelerator.name,
            self.profile.upstream_version(),
            tuple(replace(record) for record in self.records.values()),
            settings,
        )

    @property
    def accelerator(self) -> Accelerator:
        return self._accelerator

    def unapply(self) -> list[str]:
        """Take everything back, last first; returns names that other code has overwritten meanwhile."""
        foreign: list[str] = []
        modules = self._prefixed_modules()
        for target in reversed(self._order):
            foreign += target.take_back(modules)
        replaced = [pair for journal in self._hooks.values() for pair in journal.replaced()]
        for journal in reversed(list(self._hooks.values())):
            foreign += journal.undo()
        rebind(replaced, modules)  # names that upstream imported from what a hook changed
        self.process_journal.undo()
        self._order.clear()
        self._hooks.clear()
        for record in self.records.values():
            record.status, record.detail = "pending", "taken back"
        return foreign

    def retire(self, patch_id: str) -> None:
        """Take one patch back for good: an entry hook that has done its work leaves no trace in the training loop."""
        patch = next(patch for patch in self.patches if patch.id == patch_id)
        target = self._targets[patch.target]
        target.take_back(self._prefixed_modules())
        others = tuple(other for other in target.patches if other is not patch)
        if others:
            target.patches = others
            self._build(target, sys.modules[patch.module], late=False, fresh=False)
            target.rebind_aliases(self._prefixed_modules())
        else:
            self._order.remove(target)
            del self._targets[patch.target]
        self.records[patch_id].detail = "has run, and was taken back"

    # -- one module -------------------------------------------------------------------------------------------------

    def _module_loaded(
        self, module: ModuleType, neighbours: list[ModuleType], late: bool = False, fresh: bool = False
    ) -> None:
        inside = [m for m in neighbours if getattr(m, "__name__", "").startswith(self.profile.prefixes)]
        for target in [t for t in self._targets.values() if t.patches[0].module == module.__name__]:
            self._build(target, module, late, fresh)
            target.rebind_aliases(inside)
        for patch in self._of_module(module.__name__, "hook"):
            if fresh and patch.id in self._hooks:  # a reload: the module holds its own definitions again
                self._hooks.pop(patch.id).undo()
            self._run_hook(patch, module, late)

    def _build(self, target: Target, module: ModuleType, late: bool, fresh: bool) -> None:
        active = [patch for patch in target.patches if self._skip_reason(patch) is None]
        owner = target.owner(module)
        if fresh:
            target.take_back([])  # after a reload the module holds its own definitions again
        elif target.value is not MISSING:
            if tuple(active) == target.stack:
                return
            self._refuse_foreign(target, target.take_back(self._prefixed_modules()))
        target.original = MISSING if owner is MISSING else target.read_original(owner)
        if target.original is MISSING and any(patch.kind != "add" for patch in active):
            active = [patch for patch in active if not self._report_missing(patch)]
        if not active:
            return
        try:
            self._apply_stack(target, owner, active, late)
        except Exception as error:
            target.take_back(self._prefixed_modules())
            raise self._failure(active, error) from error

    def _apply_stack(self, target: Target, owner: Any, active: list[Patch], late: bool) -> None:
        current, rewrap = unwrap_descriptor(target.original)
        value = current
        states = []
        for patch in active:
            problem = self._drift(patch)
            made = load_by_name(patch.make)(value, self._context())
            if isinstance(made, Skip):
                states.append((patch, "skipped", made.reason))
                continue
            value = dress(made, value) if patch.kind == "wrap" else made
            states.append((patch, "drifted" if problem else "late" if late else "applied", problem))
        if value is not current or target.original is MISSING:
            target.commit(owner, rewrap(value) if rewrap else value, active)
            if target not in self._order:
                self._order.append(target)
        for patch, status, detail in states:
            self._settle(patch, status, detail)

    def _run_hook(self, patch: Patch, module: ModuleType, late: bool) -> None:
        if self._skip_reason(patch) is not None:
            if patch.id in self._hooks:
                self._hooks.pop(patch.id).undo()
            return
        if patch.id in self._hooks:
            return
        journal = Journal()
        try:
            outcome = load_by_name(patch.make)(module, self._context(), journal)
        except Exception as error:
            journal.undo()
            raise self._failure([patch], error) from error
        if isinstance(outcome, Skip):
            self._settle(patch, "skipped", outcome.reason)
        else:
            self._hooks[patch.id] = journal
            self._settle(patch, "late" if late else "applied")

    # -- decisions --------------------------------------------------------------------------------------------------

    def _skip_reason(self, patch: Patch) -> str | None:
        """Why `patch` does not apply now, recorded as such; None if it does."""
        reason: str | None = None
        pending = False
        if patch.phase == "configured" and not self.configured:
            reason, pending = "waits for the settings", True
        elif not self._wanted(patch):
            reason = f"feature {patch.feature} is off"
        if reason is None and not version_in_range(self.profile.upstream_version(), patch.versions):
            low, high = patch.versions
            reason = f"for versions from {low or 'any'} to below {high or 'any'}"
        if reason is None and patch.when:
            reason = load_by_name(patch.when)(self._context())
        if reason is not None:
            self._settle(patch, "pending" if pending else "skipped", reason)
        return reason

    def _wanted(self, patch: Patch) -> bool:
        early = patch.provisional and not self.configured
        return patch.feature == "core" or early or self.settings.enabled(patch.feature)

    def _drift(self, patch: Patch) -> str:
        """A warning about the target's definition, or nothing; raises if the patch must not be applied."""
        module = sys.modules[patch.module]
        source = self._sources.get(patch.module)
        if source is None and (patch.parameters or self._lock.covers(patch.target)):
            source = self._sources[patch.module] = SourceFile.read(module.__file__ or "")
        problem, refused = drift_of(patch, source.find(patch.attribute) if source else None, self._lock)
        if refused:
            raise PatchError(
                patch,
                problem,
                f"Checked: {', '.join(self._lock.releases)}; `musa-titan doctor --upstream PATH` shows all drift",
                self.profile.upstream_version(),
            )
        return problem

    def _report_missing(self, patch: Patch) -> bool:
        """True if the absence of the target is no error; raises otherwise."""
        if patch.kind == "add":
            return False
        if not patch.required:
            self._settle(patch, "skipped", "this release has no such name")
            return True
        self._settle(patch, "failed", "target is missing")
        raise PatchError(
            patch,
            "the target does not exist",
            "It moved or was removed: run `musa-titan doctor --upstream PATH` and use a release in its table",
            self.profile.upstream_version(),
        )

    def _refuse_foreign(self, target: Target, foreign: list[str]) -> None:
        if foreign:
            raise PatchError(
                target.patches[0],
                f"{', '.join(foreign)} was overwritten by other code after musa_titan had patched it",
                "Load that code before apply_*_patch(), or leave it out",
                self.profile.upstream_version(),
            )

    def _failure(self, patches: list[Patch], error: Exception) -> Exception:
        for patch in patches:
            self._settle(patch, "failed", str(error))
        if isinstance(error, MusaTitanError):
            return error
        return PatchError(
            patches[-1],
            f"{type(error).__name__}: {error}",
            "The target was left as it was",
            self.profile.upstream_version(),
        )

    def _warn_of_drift(self) -> None:
        drifted = [record for record in self.records.values() if record.status == "drifted"]
        if not drifted:
            return
        lines = "; ".join(f"{record.target}: {record.detail}" for record in drifted)
        message = f"{len(drifted)} patched definitions are unknown to patches.lock.json: {lines}"
        if self.settings.strict:
            raise MusaTitanError(f"{message}. Use a checked release, or leave strict mode off to go on with a warning")
        logger.warning("musa_titan: %s", message)

    # -- small helpers ----------------------------------------------------------------------------------------------

    def _context(self) -> Context:
        return Context(self.settings, self._accelerator, self.profile.upstream_version())

    def _settle(self, patch: Patch, status: Any, detail: str = "") -> None:
        record = self.records[patch.id]
        record.status, record.detail = status, detail

    def _of_module(self, name: str, kind: str) -> list[Patch]:
        return [patch for patch in self.patches if patch.kind == kind and patch.module == name]

    def _prefixed_modules(self) -> list[ModuleType]:
        return [m for name, m in list(sys.modules.items()) if name.startswith(self.profile.prefixes) and m is not None]


def _is_complete(module: ModuleType | None) -> bool:
    """Whether `module` is loaded and has finished executing; a lazy module that was never touched does not count."""
    if module is None or type(module).__name__ == "_LazyModule":
        return False
    spec = object.__getattribute__(module, "__dict__").get("__spec__")
    return not getattr(spec, "_initializing", False)
