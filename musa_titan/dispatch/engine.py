"""Where the work of a call runs: beside the caller, in the order of submission.

Host: a thread plays the copy engine. A caller that waits for a job which has not begun runs it itself, together with
those before it, so a call that is waited for at once costs no change of threads. Device: a side stream.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from musa_titan.dispatch.events import StreamEvent, Waitable


class CopyEngine(Protocol):
    """Runs jobs in order."""

    def submit(self, work: Callable[[], None], tensors: Sequence[torch.Tensor]) -> Waitable:
        """Run `work` after the jobs before it; `tensors` are what it reads and writes."""

    def close(self) -> None:
        """Run what is left, and end."""


class Job:
    """One call's work."""

    def __init__(self, engine: ThreadEngine, work: Callable[[], None]) -> None:
        self._engine, self._work = engine, work
        self._error: BaseException | None = None
        self.done = False

    def run(self) -> None:
        """Do it; an error is kept for :meth:`wait`."""
        try:
            with torch.no_grad():
                self._work()
        except BaseException as error:
            self._error = error
        self._work = _nothing
        self.done = True

    def wait(self) -> None:
        """Return when it is done.

        Raises:
            DispatchError: it failed.
        """
        while not self.done:
            self._engine.step()
        if self._error is not None:
            raise self._error


class ThreadEngine:
    """Jobs on a thread of their own."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._order = threading.Lock()
        self._wake = threading.Semaphore(0)
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None], tensors: Sequence[torch.Tensor] = ()) -> Job:
        """See :class:`CopyEngine`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="musa_titan copy engine", daemon=True)
            self._thread.start()
        job = Job(self, work)
        self._jobs.append(job)
        self._wake.release()
        return job

    def step(self) -> None:
        """Run the oldest job, if there is one, or wait for the one that runs."""
        with self._order:
            if self._jobs:
                self._jobs.popleft().run()

    def close(self) -> None:
        """See :class:`CopyEngine`."""
        while self._jobs:
            self.step()
        self._closed = True
        self._wake.release()

    def _loop(self) -> None:
        while True:
            self._wake.acquire()
            if self._closed:
                return
            self.step()


class StreamEngine:
    """Jobs on a side stream, behind what the current stream holds when they are submitted."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.stream = runtime.Stream()

    def submit(self, work: Callable[[], None], tensors: Sequence[torch.Tensor]) -> Waitable:
        """See :class:`CopyEngine`. The host returns when everything is in the stream."""
        caller = self._runtime.current_stream()
        self.stream.wait_stream(caller)
        with self._runtime.stream(self.stream), torch.no_grad():
            work()
            for tensor in tensors:
                tensor.record_stream(self.stream)
            event = self._runtime.Event()
            event.record(self.stream)
        return StreamEvent(self._runtime, event)

    def close(self) -> None:
        """Wait for the stream."""
        self.stream.synchronize()


class InlineEngine:
    """Jobs run where they are submitted: for transports that must not be called from two threads."""

    def submit(self, work: Callable[[], None], tensors: Sequence[torch.Tensor] = ()) -> Waitable:
        """See :class:`CopyEngine`."""
        with torch.no_grad():
            work()
        return _DONE

    def close(self) -> None:
        """Nothing is pending."""


class _Done:
    def wait(self) -> None:
        """It is."""


_DONE = _Done()


def _nothing() -> None:
    pass
