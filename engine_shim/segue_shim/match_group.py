"""Asks the daemons of all ranks of an engine at once: what every rank holds can be loaded, no more.

Owned by the scheduler's thread. Invariants: no call takes longer than one deadline (and a millisecond a
rank), and none raises; without an answer from each rank nothing is held; the lease of an answer that is not
used is given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from segue_core.clock import Clock, MonotonicClock
from segue_core.messages.local import Matched
from segue_shim.match_client import MatchClient
from segue_shim.options import ExporterOptions
from segue_shim.plan import Source, unpack_u64

EXTENT_BYTES = 8
ARRIVED_NS = 1_000_000
"""What has arrived when the deadline has passed is read all the same: its lease is to be given back."""


@dataclass(frozen=True, slots=True)
class GroupMatch:
    """KV of `tokens` tokens that every rank holds, from block `first_block` on, until `deadline_ns`;
    `sources` are the ranks', in rank order."""

    tokens: int
    first_block: int
    deadline_ns: int
    sources: tuple[Source, ...]

    def blocks(self, first: int, last: int) -> tuple[Source, ...]:
        """The sources of the blocks [first, last) alone."""
        begin, end = first - self.first_block, last - self.first_block
        return tuple(
            Source(source.daemon, source.lease, source.deadline_ns, source.extents[begin:end])
            for source in self.sources
        )


class MatchGroup:
    """One client a rank, in rank order."""

    def __init__(
        self,
        clients: Sequence[MatchClient],
        block_size: int,
        options: ExporterOptions | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clients = tuple(clients)
        self._block_size = block_size
        self._wait_ns = (options or ExporterOptions()).match_timeout_ms * 1_000_000
        self._clock = clock or MonotonicClock()

    def match(
        self, *, seq: str, epoch: int, salt: bytes, token_ids: bytes, computed: int, limit: int
    ) -> GroupMatch | None:
        """What every rank holds of `token_ids` beyond `computed`, at most `limit` tokens; None: nothing.

        The answer must be given back with `drop`, or with `release` for each source.
        """
        now = self._clock.now_ns()
        if any(client.quiet(now) for client in self._clients):
            return None
        deadline = now + self._wait_ns
        asked: list[MatchClient] = []
        for client in self._clients:
            if not client.ask(
                deadline,
                seq=seq,
                epoch=epoch,
                salt=salt,
                token_ids=token_ids,
                computed=computed,
                limit=limit,
            ):
                break
            asked.append(client)
        answers = [client.answer(max(deadline, self._clock.now_ns() + ARRIVED_NS)) for client in asked]
        found = [(client, answer) for client, answer in zip(asked, answers, strict=True) if answer]
        if len(found) < len(self._clients):
            for client, answer in found:
                client.release(answer.lease, 0)
            return None
        return self._common(found)

    def _common(self, found: Sequence[tuple[MatchClient, Matched]]) -> GroupMatch:
        tokens = min(answer.tokens for _, answer in found)
        first = max(answer.first_block for _, answer in found)
        last = -(-tokens // self._block_size)
        sources = tuple(
            Source(
                daemon=client.daemon,
                lease=answer.lease,
                deadline_ns=answer.deadline_ns,
                extents=tuple(
                    unpack_u64(
                        answer.extents[
                            EXTENT_BYTES * (first - answer.first_block) : EXTENT_BYTES
                            * (last - answer.first_block)
                        ]
                    )
                ),
            )
            for client, answer in found
        )
        return GroupMatch(tokens, first, min(source.deadline_ns for source in sources), sources)

    def drop(self, match: GroupMatch) -> None:
        """The answer is not used."""
        for source in match.sources:
            self.release(source.daemon, source.lease, 0)

    def release(self, daemon: int, lease: int, loaded: int) -> None:
        """The lease of the daemon with that incarnation is over, `loaded` tokens were used."""
        for client in self._clients:
            if client.daemon == daemon:
                client.release(lease, loaded)

    def close(self) -> None:
        """Hang up."""
        for client in self._clients:
            client.close()
