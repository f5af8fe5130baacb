"""The daemon: puts its parts together and passes events between them.

Engine journal -> ledger -> links to peers; peers' deltas -> store; engine's questions -> store. Holds no
policy of its own. One event loop, one thread: nothing here needs a lock. Every long piece of work is
bounded by `replication.delta_bytes`, so that a question from the engine never waits long.
"""

from __future__ import annotations

import asyncio
import secrets
from array import array
from pathlib import Path

import structlog
import zmq.asyncio

from segue_core import __version__
from segue_core.clock import Clock, MonotonicClock
from segue_core.content_key import TOKEN_BYTES
from segue_core.errors import ProtocolError
from segue_core.messages.local import Match, Matched, Refused, Register, Release, TierMapped
from segue_core.messages.status import DaemonStatus, EngineStatus, SequenceStatus, StoreStatus
from segue_daemon.arena import Arena
from segue_daemon.bucket import SharedBudget
from segue_daemon.engine_host import EngineHost
from segue_daemon.gpu_tier import GpuTier
from segue_daemon.group import Follower, Leader, placement_of
from segue_daemon.group_placement import FollowingPlacement
from segue_daemon.keeper import StoreKeeper
from segue_daemon.kept import OwnKeep
from segue_daemon.keys import Keys
from segue_daemon.leases import MAX_LEASES
from segue_daemon.link import Link
from segue_daemon.local import Connection, LocalServer
from segue_daemon.pages import Pages
from segue_daemon.placer import Placer
from segue_daemon.receiver import Receiver
from segue_daemon.replicas import MatchResult, Wanted
from segue_daemon.settings import DaemonSettings
from segue_daemon.store import ReplicaStore
from segue_daemon.supervise import Tasks, supervise

log = structlog.get_logger()


class Daemon:
    """One daemon beside one engine. Implements `LocalHandler` for the unix socket."""

    def __init__(
        self, settings: DaemonSettings, clock: Clock | None = None, keys: Keys | None = None
    ) -> None:
        self.settings = settings
        self.incarnation = secrets.randbits(63) | 1
        self.ready = False
        self._tasks = Tasks()
        self._clock = clock or MonotonicClock()
        self._arena = Arena(settings.store.budget_bytes)
        self.store = ReplicaStore(
            self._arena.bytes,
            lease_ns=settings.store.lease_ms * 1_000_000,
            high_watermark=settings.store.high_watermark,
            low_watermark=settings.store.low_watermark,
            session_ttl_ns=settings.store.session_ttl_ms * 1_000_000,
            verify=settings.store.verify,
        )
        self._keeper = StoreKeeper(settings.store, self.store, self._arena, self._clock)
        placement = placement_of(settings)
        self._context = zmq.asyncio.Context()
        self.receiver = Receiver(
            settings,
            self.incarnation,
            self.store,
            self._context,
            self._clock,
            self._replica_changed,
            running=lambda: self.host.running,
            host=placement.labels[0],
            keys=keys,
        )
        self.links: list[Link] = []
        ttl_ns = settings.store.keep_own_ms * 1_000_000 if settings.store.keep_own else 0
        keep = OwnKeep(self.store, ttl_ns=ttl_ns, changed=self._replica_changed)
        self.host = EngineHost(
            settings, self._clock, self.links, keep, self._tasks.spawn, self._engine_changed
        )
        self.store.written_here = self.host.epoch_of
        budget_bytes = settings.store.gpu_budget_bytes
        self._tier = GpuTier(budget_bytes, self.store, self._clock, self._tasks.spawn)
        self.store.place = self._tier.place
        budget = SharedBudget(settings.replication.max_bytes_per_s)
        for peer in settings.peers:
            self.links.append(
                Link(
                    peer,
                    settings,
                    self.incarnation,
                    self._context,
                    self._clock,
                    self.host,
                    placement,
                    budget,
                    keys,
                )
            )
        self._placer = Placer(placement, self.host, self.links, self._clock)
        self._leader = Leader(settings, placement, self._clock, self.receiver.send)
        self.receiver.members = self._leader.hear
        self._follower: Follower | None = None
        if isinstance(placement, FollowingPlacement):
            self._follower = Follower(settings, placement, self._context, self._clock, keys)
        self._local = LocalServer(Path(settings.socket), self)
        self._watermark_waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._status_changed = asyncio.Event()

    async def start(self) -> None:
        """Listen and connect. Raises StartupError when something cannot be used."""
        await self._local.start()
        await self.receiver.start()
        for link in self.links:
            self._tasks.spawn(supervise(f"link to {link.name}", link.run))
        self._tasks.spawn(supervise("progress", self.host.watch_progress))
        self._tasks.spawn(supervise("placement", self._placer.run))
        self._tasks.spawn(supervise("store", self._keeper.run))
        if self._follower is not None:
            self._tasks.spawn(supervise("rank 0", self._follower.run))
        elif self.settings.group.ranks > 1:
            self._tasks.spawn(supervise("other ranks", self._leader.run))
        self.ready = True

    async def stop(self) -> None:
        """Let go of everything, in an order that keeps what peers were told true."""
        self.ready = False
        await self._local.stop()
        await self._tasks.end()
        await self.receiver.stop()
        self._tier.close()
        self.host.stop()
        self._context.destroy(linger=0)
        self._arena.close()

    # -- the engine ---------------------------------------------------------------------------

    def arena(self) -> tuple[int, int, int]:
        return self.incarnation, self._arena.fd, self._arena.capacity

    def refusal(self, message: Register) -> Refused | None:
        return self.host.refusal(message)

    def register(
        self, message: Register, fds: list[int], connection: Connection, pages: Pages | None = None
    ) -> Refused | None:
        refused = self.host.register(message, fds, connection, pages)
        if refused is None and self.host.live is not None:
            self._tier.engine_came(self.host.live, connection)
        return refused

    def tier_mapped(self, message: TierMapped, connection: Connection) -> None:
        self._tier.mapped(message, connection)

    def gone(self, connection: Connection) -> None:
        self.host.gone(connection)

    async def let_go(self) -> None:
        await asyncio.gather(self.host.let_go(), self._tier.let_go())

    def match(self, message: Match, connection: Connection) -> None:
        found = self._find(message)
        if found.lease:
            connection.leases.add(found.lease)
            if len(connection.leases) > MAX_LEASES:  # the oldest of so many are over
                connection.leases.discard(min(connection.leases))
        connection.send(
            Matched(
                request=message.request,
                tokens=found.tokens,
                first_block=found.first_block,
                extents=array("Q", found.extents).tobytes(),
                lease=found.lease,
                deadline_ns=found.deadline_ns,
            )
        )
        asked = len(message.token_ids) // TOKEN_BYTES
        log.info("match", seq=message.seq, epoch=message.epoch, tokens=found.tokens, asked=asked)

    def _find(self, message: Match) -> MatchResult:
        if len(message.token_ids) % TOKEN_BYTES or message.computed < 0 or message.limit < 0:
            raise ProtocolError("match: token ids are cut, or counts negative")
        session = self.host.live
        if session is None or session.register.fingerprint != message.fingerprint:
            return MatchResult()
        if (session.register.rank, session.register.ranks) != (message.rank, message.ranks):
            return MatchResult()
        geometry = session.pages.geometry
        wanted = Wanted(
            fingerprint=session.ledger.fingerprint,
            salt=message.salt,
            token_ids=message.token_ids,
            block_size=geometry.block_size,
            block_bytes=geometry.block_bytes,
        )
        return self.store.match(
            wanted,
            seq=message.seq,
            computed=message.computed,
            limit=message.limit,
            now_ns=self._clock.now_ns(),
        )

    def release(self, message: Release, connection: Connection) -> None:
        if message.lease in connection.leases:
            connection.leases.discard(message.lease)
            self.store.release(message.lease, loaded=message.loaded > 0)

    # -- the router's questions ---------------------------------------------------------------

    async def promote(self, seq: str, epoch: int, want_tokens: int, wait_ms: int) -> int | None:
        """Wait until `want_tokens` are here (at most `wait_ms`), then fence lower epochs. Returns the
        watermark; None if an epoch as high stands already. Peers hear of it: one of them may hold a replica
        that the old writer would still continue."""
        if self.store.newest(seq) >= epoch:
            return None
        try:
            async with asyncio.timeout(wait_ms / 1000):
                while self.held(seq) < want_tokens:
                    await self._watermark_moves(seq)
        except TimeoutError:
            log.info("promoting without all tokens", seq=seq, held=self.held(seq), wanted=want_tokens)
        watermark = self.store.promote(seq, epoch, self._clock.now_ns())
        self.host.fence(seq, epoch)
        if watermark is not None:
            for link in self.links:
                link.end(self.incarnation, seq, epoch)
        return watermark

    async def _watermark_moves(self, seq: str) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._watermark_waiters.setdefault(seq, [])
        waiters.append(waiter)
        try:
            await waiter
        finally:
            waiters.remove(waiter)
            if not waiters:
                self._watermark_waiters.pop(seq, None)

    def _replica_changed(self, seq: str) -> None:
        replica = self.store.replicas.get(seq)
        newest = max(self.store.fence(seq), replica.epoch if replica is not None else 0)
        self.host.fence(seq, newest)  # if the engine here writes it still, it is the last to know
        for waiter in self._watermark_waiters.get(seq, ()):
            if not waiter.done():
                waiter.set_result(None)

    def held(self, seq: str) -> int:
        """Tokens of `seq` held here for a peer."""
        replica = self.store.replicas.get(seq)
        return replica.watermark if replica else 0

    def sequence_status(self, seq: str) -> SequenceStatus | None:
        """What is known of one sequence here; the engine's own goes before a replica of lower epoch."""
        session = self.host.session
        replica = self.store.replicas.get(seq)
        sequence = session.ledger.sequences.get(seq) if session is not None else None
        newest = replica.epoch if replica is not None else 0
        kept = replica is not None and replica.own and self.host.live is None
        if session is not None and sequence is not None and sequence.epoch >= newest + kept:
            peers = {link.name: link.watermark(session, seq) for link in self.links}
            return SequenceStatus(
                seq=seq,
                role="fenced" if sequence.fenced else "owner",
                epoch=max(sequence.epoch, sequence.fence),
                computed=sequence.computed,
                known=sequence.known,
                watermark=max(peers.values(), default=0),
                bytes=len(sequence.blocks) * session.ledger.geometry.block_bytes,
                peers=peers,
            )
        if replica is None:
            return self._remains_of(seq)
        return SequenceStatus(
            seq=seq,
            role="replica",
            epoch=max(replica.epoch, self.store.fence(seq)),
            computed=replica.watermark,
            known=replica.watermark,
            watermark=replica.watermark,
            bytes=len(replica.blocks) * replica.block_bytes,
        )

    def _remains_of(self, seq: str) -> SequenceStatus | None:
        left = self.store.remains(seq)
        if left is None:
            return None
        return SequenceStatus(
            seq=seq,
            role="cached",
            epoch=max(left.epoch, self.store.fence(seq)),
            computed=left.tokens,
            known=left.tokens,
            watermark=left.tokens,
            bytes=left.nbytes,
        )

    # -- status -------------------------------------------------------------------------------

    def engine_status(self) -> EngineStatus:
        """The engine as seen from here."""
        return self.host.status()

    def status(self) -> DaemonStatus:
        """`GET /status`."""
        return DaemonStatus(
            name=self.settings.name,
            version=__version__,
            incarnation=self.incarnation,
            ready=self.ready,
            engine=self.engine_status(),
            peers=tuple(link.status() for link in self.links),
            store=self._store_status(),
            copies=self._placer.status(),
            group=(self._follower or self._leader).status(),
        )

    def _store_status(self) -> StoreStatus:
        store = self.store
        return StoreStatus(
            budget_bytes=self._arena.capacity,
            used_bytes=store.used_bytes,
            cached_bytes=store.cached_bytes,
            replicas=len(store.replicas),
            leases=store.leases,
            refused=store.refused,
            corrupt=self.receiver.corrupt + store.integrity.poisoned,
            loaded_bytes=store.loaded_bytes,
            limit_bytes=store.budget.limit,
            room_bytes=store.evictor.room_bytes,
            hits=store.hits,
            misses=store.misses,
            evicted_cached_blocks=store.evictor.cached_blocks,
            evicted_stale_replicas=store.evictor.stale_replicas,
            evicted_live_replicas=store.evictor.live_replicas,
            own_replicas=store.evictor.own,
            evicted_own_replicas=store.evictor.own_replicas,
            fences_forgotten=store.fences.forgotten,
            poisoned_blocks=store.integrity.poisoned,
            scrubbed_bytes=self._keeper.scrubber.scrubbed_bytes,
            tier_bytes=self._tier.nbytes,
            tier_used_bytes=self._tier.used_bytes,
            tier_blocks=self._tier.blocks,
            tier_hits=self._tier.hits,
            tier_detail=self._tier.detail,
        )

    def _engine_changed(self) -> None:
        self._tier.engine_changed(self.host.live)
        self._status_changed.set()
        self._status_changed = asyncio.Event()

    async def engine_changed(self, timeout_s: float) -> None:
        """Return at the next change of the engine's state, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._status_changed.wait()
        except TimeoutError:
            return
