from collections.abc import Iterator
from pathlib import Path

import pytest

from test.unit.patching.synthetic import FACTORIES, Upstream, upstream_in


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[Upstream]:
    with upstream_in(tmp_path) as made:
        made.factories(FACTORIES)
        yield made
