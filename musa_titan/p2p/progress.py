"""The thread that moves transfers on, listens to the neighbours and watches the clock."""

from __future__ import annotations

import os
import threading
import time
from typing import Protocol

from musa_titan.p2p.links import Links

YIELDS = 20
"""Polls in a row before the first sleep. Spinning on would starve the engine's own threads on few cores: a spinning
writer moved 0.2 to 0.4 GB/s over TCP where a yielding one reached 2."""
SHORTEST_PAUSE = 100e-6
LONGEST_PAUSE = 1e-3
PAUSE_SHARE = 20
"""Sleep a 20th of the time waited so far: at most 5 % is added to a wait, and a long wait costs next to nothing."""
LISTEN_EVERY = 0.05
"""Seconds between looks at the links and the clock while transfers move: a look takes 6 µs, so 0.01 % of a core, and a
dead peer is noticed 50 ms late at most. While nothing moves the links themselves end the sleep."""
PARKED = 0.5
"""Longest sleep, in seconds, with nothing pending. What there can be to do then wakes the thread (news of a peer, a
post, the end), so no wait depends on it; two looks a second take 0.04 % of a core."""


class Driven(Protocol):
    """What the thread drives."""

    @property
    def pending(self) -> bool: ...
    def step(self) -> bool: ...
    def listen(self) -> None: ...
    def check_stalls(self) -> None: ...
    def enter_thread(self) -> None: ...
    def failed(self, error: BaseException) -> None: ...


class Progress:
    """Runs ``step`` while anything is pending, and sleeps on the links otherwise."""

    def __init__(self, driven: Driven, links: Links, name: str) -> None:
        self._driven = driven
        self._links = links
        self._stopping = False
        self._parked = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def notify(self) -> None:
        """There is something new to do."""
        if self._parked:
            self._links.wake()

    def stop(self) -> None:
        """End the thread; it may be the caller."""
        self._stopping = True
        self._links.wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._driven.enter_thread()
            self._loop()
        except BaseException as error:  # a thread that dies silently would leave its rank waiting for ever
            self._driven.failed(error)

    def _loop(self) -> None:
        idle = 0
        moved_at = listened_at = time.monotonic()
        while not self._stopping:
            moved = self._driven.step()
            now = time.monotonic()
            if now - listened_at > LISTEN_EVERY:
                self._driven.listen()
                self._driven.check_stalls()
                listened_at = now
            if moved:
                idle, moved_at = 0, now
                continue
            idle += 1
            if idle <= YIELDS:
                os.sched_yield()
            elif self._pause(now - moved_at):
                listened_at = 0.0

    def _pause(self, waited: float) -> bool:
        """Sleep according to how long nothing moved; whether the links were part of it."""
        pause = min(max(waited / PAUSE_SHARE, SHORTEST_PAUSE), LONGEST_PAUSE)
        if self._driven.pending and pause < LONGEST_PAUSE:
            time.sleep(pause)
            return False
        self._parked = True
        try:
            # Asked again now that `notify` knows: what was posted in between is not slept over.
            self._links.sleep(LONGEST_PAUSE if self._driven.pending else PARKED)
        finally:
            self._parked = False
        return True
