"""The name under which slime looks for its MUSA adapter, until it asks for ``musa_titan`` itself.

slime puts ``MUSA_PATCH_PATH`` on ``sys.path``, imports ``musa_patch`` while it selects its accelerator, and calls
``patch_after_import_torch()`` of it. So set ``MUSA_PATCH_PATH`` to this folder; ``ray_env("slime")`` does.
"""

import os
import sys

_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 4))
if os.path.isdir(os.path.join(_ROOT, "musa_titan")) and _ROOT not in sys.path:
    sys.path.append(_ROOT)

from musa_titan import apply_rl_patch  # noqa: E402

patch_after_import_torch = apply_rl_patch
apply_rl_patch()
