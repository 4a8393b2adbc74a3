"""Trains with miles-rl from PyPI, whose package has everything but a driver: generate → reward → train → weight sync.

usage: python examples/rl/miles/train.py [--logical-gpus N] MILES ARGUMENTS

A checkout of miles has its own train.py, which needs nothing from here.
"""

import asyncio
import os
import sys
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


def start_ray(logical_gpus: int | None) -> None:
    """Join the cluster of the job, or start one here with so many GPUs in name."""
    # What is on this driver's path must be on its workers', whose PYTHONPATH the runtime_env replaces.
    environment = ray_env("miles", {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}})
    if logical_gpus is None:
        ray.init(runtime_env=environment)
        return
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(
        address="local",
        num_gpus=logical_gpus,
        num_cpus=4 * logical_gpus,
        include_dashboard=False,
        runtime_env=environment,
    )


def main() -> None:
    """Parse miles' own arguments, and ours before them."""
    logical_gpus = None
    if sys.argv[1:2] == ["--logical-gpus"]:
        logical_gpus = int(sys.argv[2])
        del sys.argv[1:3]
    from miles.utils.arguments import parse_args

    args = parse_args()
    start_ray(logical_gpus)
    try:
        asyncio.run(train(args))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
