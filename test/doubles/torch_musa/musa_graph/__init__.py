"""Graph capture: the names exist, capturing does not."""

from __future__ import annotations

from typing import Any, NoReturn


def is_current_stream_capturing() -> bool:
    return False


def graph_pool_handle() -> tuple[int, int]:
    return (0, 0)


class MUSAGraph:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("musa double: graphs are not supported")

    # torchada wraps these on the class when it is imported.
    def capture_begin(self, *args: Any, **kwargs: Any) -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None: ...
    def reset(self) -> None: ...


class graph:  # noqa: N801 - torch's name
    default_capture_stream = None

    def __init__(self, musa_graph: MUSAGraph, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("musa double: graphs are not supported")


def make_graphed_callables(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("musa double: graphs are not supported")
