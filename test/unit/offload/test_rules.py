"""Wrong use is refused at argument validation, in one line that names the flag to change."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from musa_titan.patching.spec import MusaTitanError
from musa_titan.pretrain.offload_rules import validate
from musa_titan.settings import Settings, settings_from_environment


def settings(**options: Any) -> Settings:
    base = settings_from_environment({"MUSA_TITAN_OFFLOAD": "1"})
    return Settings({**base.options, "offload": dataclasses.replace(base["offload"], **options)})


def args(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(pipeline_model_parallel_size=4, **values)


def test_a_pipeline_of_four_is_accepted() -> None:
    validate(settings(), args())


REFUSED = {
    "--pipeline-model-parallel-size": (settings(), SimpleNamespace(pipeline_model_parallel_size=2)),
    "has none": (settings(short_pipeline=True), SimpleNamespace(pipeline_model_parallel_size=1)),
    "--overlap-moe-expert-parallel-comm": (settings(), args(overlap_moe_expert_parallel_comm=True)),
    "--fine-grained-activation-offloading": (settings(), args(fine_grained_activation_offloading=True)),
    "--cpu-offloading-num-layers": (settings(), args(cpu_offloading_num_layers=2)),
    "--moe-paged-stash": (settings(), args(moe_paged_stash=True)),
    "CUDA graphs": (settings(), args(cuda_graph_impl="local")),
    "--musa-offload-fraction 1.5": (settings(fraction=1.5), args()),
    "give one of them": (settings(fraction=0.5, peak_gb=40.0), args()),
    "--musa-offload-drain 0": (settings(drain=0), args()),
    "--musa-offload-prefetch -1": (settings(prefetch=-1), args()),
    "--musa-offload-min-bytes -1": (settings(min_bytes=-1), args()),
    "--musa-offload-host-gb 0": (settings(host_gb=0.0), args()),
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_use_is_refused_with_the_flag_to_change(message: str) -> None:
    with pytest.raises(MusaTitanError, match=message):
        validate(*REFUSED[message])


def test_a_short_pipeline_is_explained_and_can_be_forced() -> None:
    short = SimpleNamespace(pipeline_model_parallel_size=2)
    with pytest.raises(MusaTitanError, match="three blocks of activations stay on the device"):
        validate(settings(), short)
    validate(settings(short_pipeline=True), short)
