from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from test.integration.runner import ROOT, Runner


@pytest.fixture(scope="session")
def megatron() -> Iterator[Runner]:
    """Real Megatron 0.19.2 on the CPU view."""
    runner = Runner()
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
