"""Python imports this at its start when the checkout is on PYTHONPATH: arms the patches of RL, runs what it hides."""

import os
import sys

SWITCHES = ("SLIME_MUSA_PATCH_AT_STARTUP", "MILES_MUSA_PATCH_AT_STARTUP")
ours, here, path = sys.modules.pop(__name__, None), os.path.dirname(os.path.abspath(__file__)), sys.path[:]
if any(os.environ.get(switch) == "1" for switch in SWITCHES):
    try:
        __import__("musa_titan.patching.autostart")
    except Exception as error:  # never at the start of an interpreter: the first import that concerns us raises it
        problem = f"musa_titan is broken: {error!r}"

        def find_spec(name, *args):  # type: ignore[no-untyped-def]
            if name in ("slime", "miles", "megatron"):
                raise RuntimeError(problem)

        sys.meta_path.insert(0, type("BrokenInstallation", (), {"find_spec": staticmethod(find_spec)}))
sys.path[:] = [entry for entry in path if os.path.abspath(entry) != here]  # Python looks for one sitecustomize only
try:
    import sitecustomize  # noqa: F401
except ModuleNotFoundError:
    sys.modules[__name__] = ours
finally:
    sys.path[:] = path
