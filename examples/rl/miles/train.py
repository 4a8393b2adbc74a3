"""Trains with miles-rl from PyPI, whose package has everything but a driver: generate → reward → train → weight sync.

usage: python examples/rl/miles/train.py MILES ARGUMENTS

A checkout of miles has its own train.py, which needs nothing from here.
"""

import asyncio
import os
from typing import Any

import musa_titan

musa_titan.apply_rl_patch()

import ray  # noqa: E402

from musa_titan.rl import ray_env  # noqa: E402


async def train(args: Any) -> None:
    """The synchronous loop: each rollout is generated with the weights of the step before."""
    from miles.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models
    from miles.utils.tracking_utils import init_tracking

    groups = create_placement_groups(args)
    init_tracking(args)
    manager, _ = create_rollout_manager(args, groups["rollout"])
    actor, _critic = await create_training_models(args, groups, manager)
    if args.offload_rollout:
        await manager.onload_weights.remote()
    await actor.update_weights()
    if args.check_weight_update_equal:
        await manager.check_weights.remote(action="compare")
    if args.offload_rollout:
        await manager.onload_kv.remote()
    for rollout in range(args.start_rollout_id, args.num_rollout):
        data = await manager.generate.remote(rollout)
        if args.offload_rollout:
            await manager.offload.remote()
        await actor.train(rollout, data)
        if args.save_interval and (rollout + 1) % args.save_interval == 0:
            await actor.save_model(rollout)
            await manager.save.remote(rollout)
        await (actor.offload() if args.offload_train else actor.clear_memory())
        if args.offload_rollout:
            await manager.onload_weights.remote()
        await actor.update_weights()
        if args.offload_rollout:
            await manager.onload_kv.remote()
    await manager.dispose.remote()


def main() -> None:
    """Parse miles' own arguments, join the job's Ray unless this process has one, and train."""
    from miles.utils.arguments import parse_args

    args = parse_args()
    if not ray.is_initialized():
        ray.init(runtime_env=ray_env("miles", {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}))
    try:
        asyncio.run(train(args))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
