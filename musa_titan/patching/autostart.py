"""Imported at interpreter start by ``sitecustomize.py`` and ``musa_titan.pth`` where a switch is set: arms the watcher.

Costs the import of ``musa_titan`` and of ``patching.boot``, which import sys only. Whatever goes wrong is raised by the
first import of slime, miles or Megatron: an interpreter that imports none of them, such as Ray's daemons, goes on.
"""

from musa_titan.patching import boot

boot.activate("rl")
