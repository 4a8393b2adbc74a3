"""The words that ranks on one machine tell each other by, in each rank's own shared file.

======================  =========================  ================================================================
words                   who writes                 meaning
======================  =========================  ================================================================
``gave_up``             owner                      1 once a call of it has failed: peers need not wait for it
``consumed``            owner                      number of the last message that it has copied out of its window
``mail[parity][src]``   src                        announcement number, then its values
``landed[src]``         src                        number of the last message of src in the owner's window, then
                                                   rows and bytes of a row, so that a mix-up is seen
======================  =========================  ================================================================

Two mail slots are enough: announcement n+2 of a rank follows its n+1, for which it has waited for everybody's n+1, and
they wrote that after reading n. One ``landed`` is enough: src writes message n+1 after ``consumed`` has reached n.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from musa_titan.dispatch.errors import DispatchError
from musa_titan.dispatch.shared import SharedFile
from musa_titan.dispatch.transport import Announcement

GAVE_UP, CONSUMED, MAIL = 0, 1, 2
VALUES = 4
LANDED = 3
SPINS = 50
SLEEP = 50e-6
CHECK_EVERY = 0.2


def words_needed(ranks: int) -> int:
    """Size of the word area."""
    return MAIL + ranks * (2 * (1 + VALUES + ranks) + LANDED)


class Flags:
    """The words of all ranks, seen from `rank`."""

    def __init__(self, files: list[SharedFile], rank: int, timeout: float) -> None:
        self.files, self.rank, self.ranks, self.timeout = files, rank, len(files), timeout
        self._mail_words = 1 + VALUES + self.ranks
        self._landed = MAIL + 2 * self.ranks * self._mail_words

    def announce(self, number: int, mine: Announcement) -> list[Announcement]:
        """Post `mine` to everybody; return what all ranks posted."""
        values = [mine.hidden, mine.dtype, mine.topk, mine.experts, *mine.counts]
        at = self._mail(number, self.rank)
        for file in self.files:
            for index, value in enumerate(values, start=1):
                file.words[at + index] = value
            file.words[at] = number
        own = self.files[self.rank].words
        found = []
        for source in range(self.ranks):
            at = self._mail(number, source)
            self.wait(lambda at=at: own[at] >= number, source, f"its announcement of dispatch {number}")  # type: ignore[misc]
            hidden, dtype, topk, experts, *counts = own[at + 1 : at + self._mail_words].tolist()
            found.append(Announcement(tuple(counts), hidden, dtype, topk, experts))
        return found

    def wait_consumed(self, rank: int, number: int) -> None:
        """Until the window of `rank` is free for message `number` + 1."""
        words = self.files[rank].words
        self.wait(lambda: words[CONSUMED] >= number, rank, f"it to take message {number}")

    def landed(self, rank: int, number: int, rows: int, row_bytes: int) -> None:
        """Tell `rank` that message `number` of this rank is in its window."""
        at, words = self._landed + LANDED * self.rank, self.files[rank].words
        words[at + 1], words[at + 2] = rows, row_bytes
        words[at] = number

    def wait_landed(self, source: int, number: int, rows: int, row_bytes: int) -> None:
        """Until message `number` of `source` is in this rank's window; it must be the one expected.

        Raises:
            DispatchError: it has other rows: ranks call in different order, or with handles of different dispatches.
        """
        at, words = self._landed + LANDED * source, self.files[self.rank].words
        self.wait(lambda: words[at] >= number, source, f"message {number} ({rows} rows of {row_bytes} B)")
        found = (words[at + 1], words[at + 2])
        if found != (rows, row_bytes):
            raise DispatchError(
                f"ace dispatch: rank {self.rank} of the expert group expected {rows} rows of {row_bytes} B from rank "
                f"{source} in message {number}, and got {found[0]} of {found[1]} B. All ranks must call dispatch and "
                "combine in the same order, with handles of the same dispatch"
            )

    def consumed(self, number: int) -> None:
        """Tell everybody that this rank's window is free again."""
        self.files[self.rank].words[CONSUMED] = number

    def give_up(self) -> None:
        """Tell everybody not to wait for this rank."""
        self.files[self.rank].words[GAVE_UP] = 1

    def wait(self, ready: Callable[[], bool], rank: int, what: str) -> None:
        """Until `ready`, which `rank` is to bring about.

        A few polls, then sleep: on few cores a spinning process keeps the one it waits for from running.

        Raises:
            DispatchError: `rank` has died, has given up, or did nothing for ``timeout`` seconds.
        """
        for _ in range(SPINS):
            if ready():
                return
            time.sleep(0)
        started = checked = time.monotonic()
        while not ready():
            time.sleep(SLEEP)
            now = time.monotonic()
            if now - checked > CHECK_EVERY:
                checked = now
                self._check(ready, rank, what, now - started)

    def _check(self, ready: Callable[[], bool], rank: int, what: str, waited: float) -> None:
        words = self.files[rank].words
        if words[GAVE_UP] and not ready():
            raise DispatchError(
                f"ace dispatch: rank {rank} of the expert group has given up; rank {self.rank} was waiting for {what}."
                " Its own log has the cause"
            )
        if rank != self.rank and self.files[rank].owner_died() and not ready():
            raise DispatchError(
                f"ace dispatch: rank {rank} of the expert group has died; rank {self.rank} was waiting for {what}. "
                "Its own log has the cause"
            )
        if waited > self.timeout and not ready():
            raise DispatchError(
                f"ace dispatch: rank {self.rank} waited {waited:.0f} s for rank {rank} of the expert group and {what}. "
                "It is alive: it computes, hangs, or calls in another order. --musa-dispatch-timeout sets the limit"
            )

    def _mail(self, number: int, source: int) -> int:
        return MAIL + ((number & 1) * self.ranks + source) * self._mail_words
