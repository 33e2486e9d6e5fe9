"""The happens-before checker: vector clocks over streams and host threads.

Owns: timelines, the record of last accesses per byte range, and the rule that
two accesses of which one writes must be ordered. Knows nothing of torch, of
streams or of time. Must not import anything of memferry_npu but `backend.base`.

[Note: how an order arises] Each stream and each host thread is a timeline with
a vector clock. An access is stamped (timeline, own count). Recording an event
copies the stream's clock; waiting for it joins the copy into the waiter. An
operation put on a stream also joins the clock of the host thread that put it
there. An earlier access is ordered before a later one if the later one's clock
has reached the earlier stamp.
"""

from __future__ import annotations

from bisect import bisect_left

from ..base import RaceError

MAX_TIMELINES = 16
Stamp = tuple[int, int, str]
"""(timeline index, its count, operation)."""


class Timeline:
    """One stream or host thread. State over time: its vector clock."""

    __slots__ = ("clock", "index", "name")

    def __init__(self, index: int, name: str) -> None:
        self.index, self.name = index, name
        self.clock = [0] * MAX_TIMELINES

    def tick(self) -> None:
        self.clock[self.index] += 1

    def join(self, clock: list[int]) -> None:
        own = self.clock
        for i, value in enumerate(clock):
            if value > own[i]:
                own[i] = value


class _Segment:
    __slots__ = ("reads", "write")

    def __init__(self, write: Stamp | None, reads: dict[int, Stamp]) -> None:
        self.write, self.reads = write, reads


class Region:
    """A stretch of memory whose accesses are recorded by byte range.

    Args:
        label: what errors call it.
        nbytes: its size.
        strict: reading what nothing has written is an error (slots, slabs); else it is
            allowed (tensors that torch made, which start out written by their maker).
    """

    __slots__ = ("closed_by", "label", "nbytes", "segments", "starts", "strict")

    def __init__(self, label: str, nbytes: int, *, strict: bool) -> None:
        self.label, self.nbytes, self.strict = label, nbytes, strict
        self.starts: list[int] = [0]
        self.segments: list[_Segment] = [_Segment(None, {})]
        self.closed_by: list[tuple[int, int, str]] = []
        """(lo, hi, reason): ranges that hold nothing valid at the moment."""

    def _cut(self, at: int) -> int:
        """Index of the segment that starts at `at`, splitting one where needed."""
        if at >= self.nbytes:
            return len(self.starts)
        i = bisect_left(self.starts, at)
        if i < len(self.starts) and self.starts[i] == at:
            return i
        old = self.segments[i - 1]
        self.starts.insert(i, at)
        self.segments.insert(i, _Segment(old.write, dict(old.reads)))
        return i

    def range(self, lo: int, hi: int) -> list[_Segment]:
        if lo == 0 and hi >= self.nbytes:
            return self.segments
        i = self._cut(lo)
        return self.segments[i : self._cut(hi)]


class Checker:
    """All timelines of a node and the check itself. Callers hold the node's lock."""

    def __init__(self) -> None:
        self.timelines: list[Timeline] = []
        self.checks = 0

    def timeline(self, name: str) -> Timeline:
        """A new timeline. Raises RuntimeError when more than MAX_TIMELINES are made."""
        if len(self.timelines) == MAX_TIMELINES:
            raise RuntimeError(f"the checker has room for {MAX_TIMELINES} streams and threads; '{name}' is one more")
        self.timelines.append(Timeline(len(self.timelines), name))
        return self.timelines[-1]

    def access(self, who: Timeline, region: Region, lo: int, hi: int, *, write: bool, op: str) -> None:
        """Check and record that `who` accesses bytes [lo, hi) in operation `op`.

        The caller has ticked `who`. Raises RaceError naming both operations; then nothing
        was recorded.
        """
        if hi <= lo:
            return
        self.checks += 1
        for clo, chi, reason in region.closed_by:
            if clo < hi and lo < chi:
                raise RaceError(f"{_verb(write)} {_where(region, lo, hi)} by '{op}' ({who.name}): {reason}")
        segments = region.range(lo, hi)
        clock = who.clock
        for segment in segments:
            last = segment.write
            if last is None:
                if region.strict and not write:
                    raise RaceError(
                        f"read of {_where(region, lo, hi)} by '{op}' ({who.name}): nothing has been written there yet"
                    )
            elif clock[last[0]] < last[1]:
                raise RaceError(self._message(who, region, lo, hi, write, op, last, "write"))
            if write:
                for seen in segment.reads.values():
                    if clock[seen[0]] < seen[1]:
                        raise RaceError(self._message(who, region, lo, hi, write, op, seen, "read"))
        stamp = (who.index, clock[who.index], op)
        for segment in segments:
            if write:
                segment.write = stamp
                segment.reads.clear()
            else:
                segment.reads[who.index] = stamp

    def unordered_readers(self, region: Region, clock: list[int]) -> Stamp | None:
        """A read or write of `region` that a timeline with `clock` is not ordered after."""
        for segment in region.segments:
            for stamp in (segment.write, *segment.reads.values()):
                if stamp is not None and clock[stamp[0]] < stamp[1]:
                    return stamp
        return None

    def _message(
        self, who: Timeline, region: Region, lo: int, hi: int, write: bool, op: str, other: Stamp, kind: str
    ) -> str:
        return (
            f"{_verb(write)} {_where(region, lo, hi)} by '{op}' ({who.name}) is not ordered after the {kind} "
            f"by '{other[2]}' ({self.timelines[other[0]].name}): a wait is missing between them"
        )


def _verb(write: bool) -> str:
    return "write to" if write else "read of"


def _where(region: Region, lo: int, hi: int) -> str:
    return f"{region.label}[{lo}:{hi}]"
