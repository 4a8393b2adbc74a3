"""slime and miles, unmodified, on the device that ``ACCELERATOR_BACKEND`` names.

``common`` holds what both need, ``slime_musa`` and ``miles_musa`` the tables for each, ``engine`` the rollout engine
for rehearsals on a CPU, ``rehearsal`` a tiny model and task. What Megatron needs is in ``musa_titan.pretrain``.
"""

from musa_titan.rl.runtime_env import ray_env

__all__ = ["ray_env"]
