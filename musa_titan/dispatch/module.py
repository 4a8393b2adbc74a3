"""The module objects ``deep_ep`` and ``deep_ep.utils``, for a framework that imports them by name."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from importlib.machinery import ModuleSpec
from types import ModuleType

from musa_titan.dispatch.buffer import Buffer
from musa_titan.dispatch.config import Config
from musa_titan.dispatch.errors import DispatchError
from musa_titan.dispatch.events import EventHandle, EventOverlap
from musa_titan.dispatch.native import native_buffer
from musa_titan.dispatch.options import BackendName

logger = logging.getLogger("musa_titan")


def build_modules(backend: BackendName) -> dict[str, ModuleType]:
    """``deep_ep`` and ``deep_ep.utils`` for `backend`; importing is left to the caller.

    ``native`` adapts the installed package, ``auto`` does so if there is one with a known API; everything else is ours.

    Raises:
        DispatchError: ``native`` was asked for and is not there, or has an unknown API.
    """
    if backend in ("native", "auto"):
        try:
            return _native_modules()
        except DispatchError as error:
            if backend == "native":
                raise
            if importlib.util.find_spec("deep_ep") is not None:
                logger.warning("musa_titan: the installed deep_ep is not used. %s", error)
    return own_modules()


def own_modules() -> dict[str, ModuleType]:
    """Ours: transport by options."""
    package, utils = ModuleType("deep_ep", __doc__), ModuleType("deep_ep.utils", __doc__)
    package.__path__ = []
    package.__spec__, utils.__spec__ = ModuleSpec("deep_ep", None, is_package=True), ModuleSpec("deep_ep.utils", None)
    vars(package).update(Buffer=Buffer, Config=Config, utils=utils)
    vars(utils).update(EventHandle=EventHandle, EventOverlap=EventOverlap)
    return {"deep_ep": package, "deep_ep.utils": utils}


def _native_modules() -> dict[str, ModuleType]:
    """The installed package, with a Buffer of the surface that callers expect; the package itself is left alone."""
    try:
        installed = importlib.import_module("deep_ep")
        installed_utils = importlib.import_module("deep_ep.utils")
    except ImportError as error:
        raise DispatchError(
            f"native dispatch: deep_ep cannot be imported ({error}). Install MT-DeepEP (MUSA) or DeepEP (CUDA), or use "
            "--musa-dispatch ace or collective"
        ) from error
    package, utils = ModuleType("deep_ep", installed.__doc__), ModuleType("deep_ep.utils", installed_utils.__doc__)
    vars(package).update({name: value for name, value in vars(installed).items() if not name.startswith("__")})
    vars(utils).update({name: value for name, value in vars(installed_utils).items() if not name.startswith("__")})
    package.__path__ = list(getattr(installed, "__path__", []))
    package.__spec__, utils.__spec__ = installed.__spec__, installed_utils.__spec__
    vars(package).update(Buffer=native_buffer(installed), utils=utils)
    vars(utils).setdefault("EventOverlap", EventOverlap)
    if "EventHandle" not in vars(utils):
        raise DispatchError("native dispatch: the installed deep_ep.utils has no EventHandle")
    return {"deep_ep": package, "deep_ep.utils": utils}
