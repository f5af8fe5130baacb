"""What must hold, checked from outside: the invariants of replication (docs/simulation.md has the list).

Owns its own record of what was promoted, accepted, acknowledged and leased, made from what passed between
the processes. It asks the code under test for nothing but its public state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from segue_core.messages.peer import Ack, Delta, Nack, NackReason
from segue_daemon.ledger import Sequence
from segue_daemon.replicas import MatchResult, Replica
from simulation.clockwork import Violation
from simulation.content import BLOCK_BYTES, SIZE, Writing, packed_by_slot

if TYPE_CHECKING:
    from simulation.daemon import SimDaemon
    from simulation.engine import SimEngine
    from simulation.link import SimLink
    from simulation.live import Live
    from simulation.world import World


class Checks:
    """All checkers of one run. Leases: (daemon life, lease) -> deadline and the bytes of each block."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._promoted: dict[tuple[int, str], int] = {}
        self._accepted: dict[tuple[int, str], tuple[int, int]] = {}
        self._verified: dict[tuple[int, str, int, int], int] = {}
        self._leases: dict[tuple[int, int], tuple[int, list[tuple[int, bytes]]]] = {}

    # -- who may write ------------------------------------------------------------------------

    def promoted(self, daemon: SimDaemon, seq: str, epoch: int) -> None:
        """From now on lower epochs must change nothing there."""
        key = daemon.incarnation, seq
        if self._promoted.get(key, 0) >= epoch:
            raise Violation(f"{daemon.name}: {seq} was promoted to epoch {epoch} twice")
        self._promoted[key] = epoch

    def answered(self, daemon: SimDaemon, delta: Delta, answer: Ack | Nack) -> None:
        """A delta was taken or refused."""
        key = daemon.incarnation, delta.seq
        if isinstance(answer, Nack):
            if answer.reason == NackReason.MALFORMED:
                raise Violation(f"{daemon.name}: an honest delta is called malformed: {answer}")
            return
        fence = self._promoted.get(key, 0)
        if delta.epoch < fence:
            raise Violation(
                f"{daemon.name}: {delta.seq} of epoch {delta.epoch} accepted, promoted to {fence}"
            )
        epoch, incarnation = self._accepted.get(key, (0, 0))
        if delta.epoch < epoch:
            raise Violation(f"{daemon.name}: {delta.seq} of epoch {delta.epoch} accepted after {epoch}")
        if (delta.epoch, delta.incarnation) != (epoch, incarnation) and delta.base:
            raise Violation(f"{daemon.name}: {delta.seq} of one writer continues another's")
        self._accepted[key] = delta.epoch, delta.incarnation
        upto = delta.base + len(delta.token_ids) // 4
        if answer.watermark != upto:
            raise Violation(
                f"{daemon.name}: {delta.seq} acked at {answer.watermark}, the delta ends at {upto}"
            )
        who = (daemon.incarnation, delta.seq, delta.epoch, delta.incarnation)
        replica = daemon.store.replicas.get(delta.seq)
        if replica is None or replica.watermark != upto:
            raise Violation(f"{daemon.name}: {delta.seq} acked at {upto}, but not held")
        self._verified[who] = max(self._verified.get(who, 0), upto)

    def acked(self, link: SimLink, message: Ack | Nack) -> None:
        """A writer took an answer in: it must not believe in more than was ever verified."""
        for incarnation, shipment in link.shipments.items():
            progress = shipment.planner.progress.get(message.seq)
            if progress is None:
                continue
            who = (link.peer_incarnation, message.seq, progress.epoch, incarnation)
            verified = self._verified.get(who, 0)
            if progress.acked > verified:
                raise Violation(
                    f"{link.daemon.name}: {message.seq} counts {progress.acked} tokens at {link.name},"
                    f" which verified {verified}"
                )

    # -- what is held -------------------------------------------------------------------------

    def store(self, daemon: SimDaemon) -> None:
        """Everything that one store says it has."""
        store, memory = daemon.store, daemon.memory
        packed = packed_by_slot(memory, self._world.slotted)
        for key in [k for k in self._accepted if k[0] == daemon.incarnation and k[1] not in store.replicas]:
            self._accepted[key] = self._accepted[key][0], 0  # given up: whoever is next begins anew
        held: set[int] = set()
        for replica in store.replicas.values():
            self._replica(daemon, replica, packed)
            held.update(block.offset for block in replica.blocks)
        for reservation in daemon.receiver.open:
            held.update(block.offset for _, block in reservation.targets if block is not None)
        for (life, lease), (deadline, blocks) in self._leases.items():
            if life != daemon.incarnation:
                continue
            for offset, before in blocks:
                held.add(offset)
                if self._world.now < deadline and memory[offset : offset + BLOCK_BYTES].tobytes() != before:
                    raise Violation(f"{daemon.name}: a block changed under lease {lease}")
        used, cached = store.used_bytes, store.cached_bytes
        if used - cached != len(held) * BLOCK_BYTES:
            raise Violation(f"{daemon.name}: {used - cached} bytes are taken, {len(held)} blocks are in use")
        if not 0 <= cached <= used <= len(memory):
            raise Violation(f"{daemon.name}: {used} of {len(memory)} bytes used, {cached} cached")

    def _replica(self, daemon: SimDaemon, replica: Replica, packed: Any) -> None:
        where = f"{daemon.name}: replica {replica.seq} epoch {replica.epoch} of {replica.incarnation}"
        if self._world.replication_of(replica.seq) == "off":
            raise Violation(f"{where}: its client keeps it back")
        writing: Writing | None = self._world.truth.get((replica.seq, replica.epoch, replica.incarnation))
        if writing is None:
            raise Violation(f"{where}: nobody wrote that")
        watermark = replica.watermark
        if watermark > min(writing.told, writing.computed):
            raise Violation(
                f"{where}: {watermark} tokens, {writing.computed} computed, {writing.told} known there"
            )
        if bytes(replica.token_ids) != writing.packed[: 4 * watermark] or replica.salt != writing.salt:
            raise Violation(f"{where}: other token ids than the engine's")
        if len(replica.blocks) != -(-watermark // SIZE):
            raise Violation(f"{where}: {watermark} tokens in {len(replica.blocks)} blocks")
        for position, block in enumerate(replica.blocks):
            slots = min(SIZE, watermark - position * SIZE)
            have = packed[:, block.offset // BLOCK_BYTES, :slots].tobytes()
            if have != writing.block(position, slots):
                raise Violation(f"{where}: wrong bytes in block {position}, watermark {watermark}")

    # -- leases -------------------------------------------------------------------------------

    def matched(self, daemon: SimDaemon, live: Live, found: MatchResult) -> None:
        """What is offered must be right now, and stay as it is until the lease is over."""
        if not found.lease:
            return
        if not live.computed < found.tokens < len(live.ids):
            raise Violation(f"{daemon.name}: {found.tokens} tokens offered of {len(live.ids)}")
        packed = packed_by_slot(daemon.memory, self._world.slotted)
        blocks = []
        for index, offset in enumerate(found.extents):
            position = found.first_block + index
            slots = min(SIZE, found.tokens - position * SIZE)
            have = packed[:, offset // BLOCK_BYTES, :slots].tobytes()
            if have != live.writing.block(position, slots):
                raise Violation(f"{daemon.name}: wrong KV offered for {live.seq}, block {position}")
            blocks.append((offset, daemon.memory[offset : offset + BLOCK_BYTES].tobytes()))
        self._leases[daemon.incarnation, found.lease] = found.deadline_ns, blocks

    def released(self, daemon: SimDaemon, lease: int) -> None:
        """The engine gave a lease back."""
        self._leases.pop((daemon.incarnation, lease), None)

    def expired(self, daemon: SimDaemon) -> None:
        """Leases past their deadline bind nobody."""
        for key, (deadline, _) in list(self._leases.items()):
            if key[0] == daemon.incarnation and deadline < self._world.now:
                del self._leases[key]

    def pages(self, engine: SimEngine, seq: str, writing: Writing, blocks: list[int], upto: int) -> None:
        """What the engine itself computed or loaded."""
        for position in range(-(-upto // SIZE)):
            slots = min(SIZE, upto - position * SIZE)
            have = engine.pages[:, blocks[position], :slots].tobytes()
            if have != writing.block(position, slots):
                raise Violation(f"{engine.name}: {seq} has wrong KV in block {position} of {upto} tokens")

    # -- at rest ------------------------------------------------------------------------------

    def converged(self) -> None:
        """With everything healed, peers have what the engines have."""
        for engine, daemon in zip(self._world.engines, self._world.daemons, strict=True):
            session = daemon.live
            if session is None or session.incarnation != engine.incarnation:
                raise Violation(f"{daemon.name}: {engine.name} is not registered")
            for live in engine.live.values():
                sequence = session.ledger.sequences.get(live.seq)
                if self._over(live) or not live.begun:
                    continue
                if sequence is None or (sequence.epoch, sequence.computed) != (live.epoch, live.computed):
                    known = sequence and (sequence.epoch, sequence.computed, sequence.known)
                    raise Violation(
                        f"{daemon.name}: {live.seq} epoch {live.epoch}, {live.computed} computed,"
                        f" is not followed: {known}"
                    )
                for link in daemon.links:
                    if link.holds(live.seq) and live.replication != "off":
                        self._at_peer(daemon, link, sequence)

    def _over(self, live: Live) -> bool:
        """Whether somebody else writes it by now."""
        client = self._world.router.clients.get(live.seq)
        local = live.seq.startswith("local")
        return not local and (client is None or client.epoch > live.epoch)

    def _at_peer(self, daemon: SimDaemon, link: SimLink, sequence: Sequence) -> None:
        session, peer = daemon.session, self._world.daemon_named(link.name)
        where = f"{daemon.name}: {sequence.seq} epoch {sequence.epoch} at {link.name}"
        if session is None or not link.connected:
            raise Violation(f"{where}: not connected")
        shipment = link.shipments[session.incarnation]
        progress = shipment.planner.progress.get(sequence.seq)
        want = sequence.shippable - self._world.replication.sync_every_tokens + 1
        need = (-(-sequence.shippable // SIZE) + 1) * BLOCK_BYTES
        if self._wanted_bytes(link.name) > peer.store.budget.low or peer.store.evictor.room_bytes < need:
            return  # not all of it fits, and who is refused for now is the store's to choose
        replica = peer.store.replicas.get(sequence.seq)
        same = replica is not None and (replica.epoch, replica.incarnation) == (
            sequence.epoch,
            session.incarnation,
        )
        held = replica.watermark if replica is not None and same else 0
        if want > 0 and (held < want or shipment.watermark(sequence.seq) < want):
            raise Violation(f"{where}: {held} of {sequence.shippable} tokens after healing, {progress}")

    def _wanted_bytes(self, peer: str) -> int:
        """What a peer would take if it held all that it is to hold."""
        blocks = 0
        for daemon in self._world.daemons:
            sequences = daemon.session.ledger.sequences.values() if daemon.session is not None else ()
            for link in daemon.links:
                if link.name == peer:
                    blocks += sum(-(-s.known // SIZE) + 1 for s in sequences if link.holds(s.seq))
        return blocks * BLOCK_BYTES

    def empty(self) -> None:
        """With everything ended, nobody keeps anything."""
        for daemon in self._world.daemons:
            store = daemon.store
            left = list(store.replicas.values())
            if left:
                names = [(r.seq, r.epoch, r.incarnation, r.watermark) for r in left]
                raise Violation(f"{daemon.name}: leaks {names}")
            if store.leases or (not store.replicas and store.used_bytes != store.cached_bytes):
                raise Violation(f"{daemon.name}: {store.leases} leases, {store.used_bytes} bytes used")
            if daemon.session is not None and daemon.session.ledger.sequences:
                raise Violation(f"{daemon.name}: still follows {list(daemon.session.ledger.sequences)}")
            for link in daemon.links:
                for shipment in link.shipments.values():
                    if shipment.planner.progress or shipment.planner.waiting:
                        raise Violation(f"{daemon.name}: plans for ended {shipment.planner.progress}")
