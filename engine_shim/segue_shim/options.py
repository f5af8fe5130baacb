"""The limits and deadlines of the shim, in one frozen place; every wait in this package is one of these."""

from __future__ import annotations

from dataclasses import dataclass

from segue_core.ring import DEFAULT_CAPACITY, MAX_CAPACITY


@dataclass(frozen=True)
class ExporterOptions:
    """Sizes in bytes, times in milliseconds.

    Raises ValueError for a value outside its bounds, with the name of the option.
    """

    ring_bytes: int = DEFAULT_CAPACITY
    """Room for journal records that the daemon has not read yet."""
    connect_timeout_ms: int = 1_000
    """Registering: how long connecting and sending may take (in a thread of its own)."""
    reply_timeout_ms: int = 5_000
    """Registering: how long the daemon may take to answer (in a thread of its own)."""
    retry_min_ms: int = 100
    retry_max_ms: int = 2_000
    """Pause between attempts to register: doubles from the first to the second."""
    retry_refused_ms: int = 30_000
    """Pause after the daemon said that it cannot use this engine."""
    match_timeout_ms: int = 250
    """How long a resumed request may hold up the scheduler while the daemon looks for its replica."""
    match_pause_ms: int = 1_000
    """After a failure the daemon is not asked, or connected to, again for this long."""
    lease_margin_ms: int = 200
    """A replica whose lease ends sooner than this is asked for again instead of loaded."""

    def __post_init__(self) -> None:
        if self.ring_bytes % 8 or not 4096 <= self.ring_bytes <= MAX_CAPACITY:
            raise ValueError(f"ring_bytes {self.ring_bytes}: a multiple of 8 from 4096 to {MAX_CAPACITY}")
        for name in (
            "connect_timeout_ms",
            "reply_timeout_ms",
            "retry_min_ms",
            "retry_max_ms",
            "retry_refused_ms",
            "match_timeout_ms",
            "match_pause_ms",
            "lease_margin_ms",
        ):
            if not 1 <= getattr(self, name) <= 3_600_000:
                raise ValueError(f"{name} {getattr(self, name)}: milliseconds from 1 to 3600000")
        if self.retry_min_ms > self.retry_max_ms:
            raise ValueError("retry_min_ms is larger than retry_max_ms")
