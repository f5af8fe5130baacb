"""Lag: the time from a token's commit here to its ack at a peer. Pure: `now_ns` is passed in.

Costs what changed: a mark at each growth of a sequence, taken off by the ack that covers it. Bounded: at most
`MAX_MARKS` a sequence; beyond that neighbours are merged into the older time, so lag is never understated.
A token that was committed before its peer was chosen counts from that moment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
MAX_MARKS = 64
RECENT = 512
"""Acks that the quantiles are taken over."""
SMOOTHING = 0.1
NS_PER_MS = 1_000_000


class LagMeter:
    """The lag of one peer. `counts[i]` tokens were acked within `BOUNDS_MS[i]`, the last ones later."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_MS) + 1)
        self.sum_ms = 0.0
        self.recent_ms = 0.0
        """Moving average over acks and pings: how good the way to this peer is."""
        self._recent: deque[float] = deque(maxlen=RECENT)

    def observe(self, tokens: int, lag_ms: float) -> None:
        """`tokens` tokens were acked `lag_ms` after their commit."""
        self.counts[bisect_left(BOUNDS_MS, lag_ms)] += tokens
        self.sum_ms += tokens * lag_ms
        self.recent_ms += SMOOTHING * (lag_ms - self.recent_ms)
        self._recent.append(lag_ms)

    def quantile_ms(self, fraction: float) -> float:
        """The lag that this part of the last `RECENT` acks did not exceed; 0 before the first."""
        ordered = sorted(self._recent)
        return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else 0.0

    def breathe(self, round_trip_ms: float) -> None:
        """A ping was answered: what the way is like when nothing is sent."""
        self.recent_ms += SMOOTHING * (round_trip_ms - self.recent_ms)

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, tokens up to it), as Prometheus wants a histogram."""
        bounds = [*(str(float(bound)) for bound in BOUNDS_MS), "+Inf"]
        total = 0
        found = []
        for bound, count in zip(bounds, self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class LagMarks:
    """When the tokens that a peer has not acked yet were committed, for one shipment."""

    def __init__(self, meter: LagMeter) -> None:
        self._meter = meter
        self._marks: dict[str, deque[tuple[int, int, int]]] = {}

    def grew(self, seq: str, low: int, upto: int, now_ns: int) -> None:
        """`seq` has `upto` tokens to send by now; those below `low` are acked."""
        marks = self._marks.setdefault(seq, deque())
        if marks:
            low = marks[-1][1]
        if upto > low:
            marks.append((low, upto, now_ns))
        if len(marks) > MAX_MARKS:
            halved = [
                (older[0], newer[1], older[2])
                for older, newer in zip(list(marks)[0:-1:2], list(marks)[1::2], strict=True)
            ]
            self._marks[seq] = deque([*halved, marks[-1]] if len(marks) % 2 else halved)
        if not marks:
            del self._marks[seq]

    def acked(self, seq: str, watermark: int, now_ns: int) -> None:
        """The peer holds `watermark` tokens of `seq`."""
        marks = self._marks.get(seq)
        while marks:
            low, upto, since_ns = marks[0]
            if watermark <= low:
                return
            self._meter.observe(min(watermark, upto) - low, (now_ns - since_ns) / NS_PER_MS)
            marks.popleft()
            if watermark < upto:
                marks.appendleft((watermark, upto, since_ns))
                return
        self._marks.pop(seq, None)

    def forget(self, seq: str) -> None:
        """`seq` is over, or not sent any more."""
        self._marks.pop(seq, None)

    def lagging(self) -> tuple[str, ...]:
        """Sequences with tokens that are not acked."""
        return tuple(self._marks)

    def oldest_ms(self, now_ns: int) -> float:
        """Age of the oldest token that is not acked; 0 if there is none. O(sequences that lag)."""
        since_ns = min((marks[0][2] for marks in self._marks.values()), default=now_ns)
        return max(0.0, (now_ns - since_ns) / NS_PER_MS)
