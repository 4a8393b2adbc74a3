from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from test.doubles.process import DOUBLES
from test.integration.runner import ROOT, Runner


@pytest.fixture(scope="session")
def megatron() -> Iterator[Runner]:
    """Real Megatron 0.19.2 on the CPU view."""
    runner = Runner()
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def musa() -> Iterator[Runner]:
    """Real Megatron 0.19.2 on the torch_musa double, which draws random numbers as the CPU view does."""
    runner = Runner({"ACCELERATOR_BACKEND": "musa", "MUSA_DOUBLE_SHARED_RNG": "1"}, paths=[Path(DOUBLES)])
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def megatron_release() -> Iterator[Callable[[str], Runner]]:
    """``megatron_release("0.18.2")``: the same with another release, which ``test/run.sh`` unpacks under .cache."""
    runners: dict[str, Runner] = {}

    def of_release(version: str) -> Runner:
        if version not in runners:
            runners[version] = Runner(megatron=release_directory(version))
        return runners[version]

    yield of_release
    for runner in runners.values():
        runner.close()


def release_directory(version: str) -> Path:
    directory = ROOT / ".cache" / "megatron" / version
    assert directory.is_dir(), (
        f"megatron-core {version} is not in {directory}: run `bash test/run.sh`, which unpacks it"
    )
    return directory
