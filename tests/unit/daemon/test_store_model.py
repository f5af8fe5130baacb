"""The replica store against a simple model: whatever peers, engines, time and failing memory do to it, it
stays within its budget, keeps what is being loaded, and never claims more than it has."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from segue_core.content_key import TOKEN_BYTES, block_key, chain, root_key
from segue_core.messages.peer import Delta, End, NackReason, Part, PartKind
from segue_daemon.blocks import Block
from segue_daemon.replicas import Loss, Refusal, Reservation, Wanted
from segue_daemon.store import ReplicaStore

SIZE = 4
BLOCK = 64
FINGERPRINT = b"f" * 16
SEQS = st.sampled_from(["a0", "a1", "a2", "b0", "b1", "b2"])
TTL_NS = 50


def ids_of(seq: str, count: int) -> bytes:
    """The first tokens of a sequence; those whose names begin alike share their first ten."""
    base = ord(seq[0]) * 1000
    own = base + 100 * (1 + int(seq[1]))
    return array("I", [base + i if i < 10 else own + i for i in range(count)]).tobytes()


def content(prefix: bytes) -> bytes:
    """The KV of a block: a function of all tokens up to its end."""
    return (block_key(root_key(FINGERPRINT, b""), prefix) * 4)[:BLOCK]


def delta_for(seq: str, epoch: int, base: int, upto: int, by_key: set[int]) -> tuple[Delta, dict[int, bytes]]:
    """A delta of whole blocks, and of keys at the positions `by_key`; and the payload of each part."""
    ids = ids_of(seq, upto)
    keys = list(chain(root_key(FINGERPRINT, b""), ids, SIZE))
    parts, payload = [], {}
    for position in range(base // SIZE, -(-upto // SIZE)):
        key = keys[position] if position < len(keys) else b""
        if key and position in by_key and position * SIZE >= base:
            parts.append(Part(position, PartKind.KEY, key, 0))
            continue
        payload[len(parts)] = content(ids[: min(upto, (position + 1) * SIZE) * TOKEN_BYTES])
        parts.append(Part(position, PartKind.WHOLE, key, BLOCK))
    new = ids[base * TOKEN_BYTES :]
    made = Delta(1, seq, epoch, 1, FINGERPRINT, b"", SIZE, BLOCK, base, new, tuple(parts), 0)
    return made, payload


class StoreMachine(RuleBasedStateMachine):
    """Writers, loading engines, the clock, failing memory and a store that is too small for them."""

    @initialize(blocks=st.integers(4, 40), low=st.floats(0.3, 1.0), verify=st.sampled_from(["always", "off"]))
    def begin(self, blocks: int, low: float, verify: Any) -> None:
        self.memory = np.zeros(blocks * BLOCK, np.uint8)
        self.verify = verify
        self.store = ReplicaStore(
            self.memory,
            lease_ns=20,
            high_watermark=(1 + low) / 2,
            low_watermark=low,
            session_ttl_ns=TTL_NS,
            verify=verify,
            on_loss=self.lost,
        )
        self.now = 1
        self.told: dict[tuple[str, int], int] = {}
        """What the writer of a sequence under an epoch believes is held: the last ack or loss."""
        self.epoch: dict[str, int] = {}
        self.pending: list[tuple[Reservation, dict[int, bytes]]] = []
        self.leases: dict[int, tuple[str, int, list[tuple[int, bytes]]]] = {}
        self.poisoned: set[Block] = set()

    def lost(self, loss: Loss) -> None:
        key = loss.seq, loss.epoch
        assert loss.watermark < self.told[key], "told of a loss that is none"
        if loss.reason == NackReason.NO_ROOM:
            assert loss.seq not in {seq for seq, _, _ in self.leases.values()}, "evicted under a load"
            assert not any(r.replica.seq == loss.seq and not r.fresh for r, _ in self.pending)
        self.told[key] = loss.watermark

    @rule(seq=SEQS, more=st.integers(1, 11), by_key=st.sets(st.integers(0, 5)), wait=st.booleans())
    def ship(self, seq: str, more: int, by_key: set[int], wait: bool) -> None:
        if any(r.delta.seq == seq for r, _ in self.pending):
            return
        epoch = self.epoch.setdefault(seq, 1)
        base = self.told.get((seq, epoch), 0)
        made, payload = delta_for(seq, epoch, base, base + more, by_key)
        outcome = self.store.reserve(made, "w", self.now)
        if isinstance(outcome, Refusal):
            assert outcome.reason in (NackReason.KEY_UNKNOWN, NackReason.NO_ROOM)
            held = self.store.replicas.get(seq)
            assert outcome.watermark == (held.watermark if held and held.epoch == epoch else 0)
            self.told[seq, epoch] = outcome.watermark
            return
        self.pending.append((outcome, payload))
        if not wait:
            self.arrive(len(self.pending) - 1, False)

    def arrive(self, index: int, broken: bool) -> None:
        reservation, payload = self.pending.pop(index)
        for part, data in payload.items():
            room = self.store.room_for(reservation, part)
            assert room is not None
            room[:] = np.frombuffer(data, np.uint8)
        if broken:
            self.store.cancel(reservation)
            return
        outcome = self.store.commit(reservation, {}, self.now)
        if isinstance(outcome, Refusal):
            assert outcome.reason in (NackReason.GAP, NackReason.FENCED, NackReason.KEY_UNKNOWN)
        else:
            self.told[reservation.delta.seq, reservation.delta.epoch] = outcome

    @rule(index=st.integers(0, 5), broken=st.booleans())
    def payload_arrives(self, index: int, broken: bool) -> None:
        if self.pending:
            self.arrive(index % len(self.pending), broken)

    @rule(seq=SEQS, asked=st.integers(1, 40), computed=st.integers(0, 8))
    def match(self, seq: str, asked: int, computed: int) -> None:
        ids = ids_of(seq, asked)
        wanted = Wanted(FINGERPRINT, b"", ids, SIZE, BLOCK)
        found = self.store.match(wanted, seq=seq, computed=computed, limit=asked - 1, now_ns=self.now)
        if not found.tokens:
            return
        assert computed < found.tokens < asked
        pinned = []
        for number, offset in enumerate(found.extents, found.first_block):
            have = bytes(self.memory[offset : offset + BLOCK])
            pinned.append((offset, have))
            if self.verify == "always" and (number + 1) * SIZE <= found.tokens:
                assert have == content(ids[: (number + 1) * SIZE * TOKEN_BYTES]), "given out, but wrong"
        self.leases[found.lease] = (seq, found.deadline_ns, pinned)

    @rule(loaded=st.booleans())
    def release(self, loaded: bool) -> None:
        if self.leases:
            number, (seq, _, _) = self.leases.popitem()
            self.store.release(number, loaded=loaded)
            self.forget_absent(seq)

    @rule(seq=SEQS)
    def end(self, seq: str) -> None:
        self.store.end(End(seq, self.epoch.get(seq, 1), 1))
        self.forget_absent(seq)

    @rule(seq=SEQS)
    def promote(self, seq: str) -> None:
        self.epoch[seq] = self.epoch.get(seq, 1) + 2
        held = self.store.replicas.get(seq)
        assert self.store.promote(seq, self.epoch[seq], self.now) == (held.watermark if held else 0)
        assert self.store.promote(seq, self.epoch[seq], self.now) is None

    @rule(passed=st.integers(1, 40))
    def time_passes(self, passed: int) -> None:
        self.now += passed
        for number in [n for n, (_, deadline, _) in self.leases.items() if deadline < self.now]:
            del self.leases[number]
        self.store.expire(self.now)
        self.store.evictor.trim(self.now)

    @rule(fraction=st.sampled_from([0.2, 0.6, 1.0]))
    def host_has_memory(self, fraction: float) -> None:
        self.store.budget.limit = int(len(self.memory) * fraction)
        self.store.evictor.trim(self.now)
        if self.store.used_bytes > self.store.budget.limit:
            spare = [
                r
                for r in self.store.replicas.values()
                if not r.busy and r.seq not in {seq for seq, _, _ in self.leases.values()}
            ]
            assert not spare and not self.store.cached_bytes, "over the limit, and yet something to give up"

    @rule(number=st.integers(0, 50))
    def memory_fails(self, number: int) -> None:
        sealed = [b for b in self.store._pool._by_key.values() if not b.pins]
        if self.verify != "off" and sealed:
            block = sealed[number % len(sealed)]
            self.memory[block.offset] ^= 1
            self.poisoned ^= {block}

    @rule()
    def scrub(self) -> None:
        found = self.store.integrity.poisoned
        wrong = {b for b in self.poisoned if self.store._pool._by_key.get(b.key) is b}
        for _ in range(self.store.sealed_blocks):
            self.store.integrity.scrub_one(self.now)
        assert self.store.integrity.poisoned == found + (len(wrong) if self.verify != "off" else 0)
        self.poisoned.clear()

    def forget_absent(self, seq: str) -> None:
        """A writer that ended its sequence, or was fenced off, holds nothing any more."""
        if seq not in self.store.replicas:
            self.told = {key: held for key, held in self.told.items() if key[0] != seq}

    def held_blocks(self) -> dict[int, Block]:
        """Every block that a replica or a delta on its way has, by identity."""
        held = {id(b): b for r in self.store.replicas.values() for b in r.blocks}
        return held | {id(b): b for r, _ in self.pending for _, b in r.targets if b is not None}

    @invariant()
    def what_is_loaded_does_not_change(self) -> None:
        for _, _, pinned in self.leases.values():
            for offset, before in pinned:
                assert bytes(self.memory[offset : offset + BLOCK]) == before

    @invariant()
    def the_sums_are_right(self) -> None:
        pool = self.store._pool
        free = sum(nbytes for _, nbytes in self.store.free_extents())
        assert self.store.used_bytes + free == len(self.memory)
        assert self.store.cached_bytes == BLOCK * len(pool._cached)
        taken = self.held_blocks() | {id(b): b for b in pool._cached.values()}
        for lease in self.store._leases._out.values():
            taken |= {id(b): b for b in lease.blocks}
        assert self.store.used_bytes == BLOCK * len(taken)
        offsets = {b.offset for b in taken.values()}
        assert len(offsets) == len(taken), "two blocks in one place"
        keys = [b.key for b in taken.values() if b.key]
        assert len(keys) == len(set(keys)), "one key names two blocks"

    @rule(seq=SEQS)
    def what_is_left_of_an_ended_sequence_is_there(self, seq: str) -> None:
        left = self.store.remains(seq)
        if left is not None:
            assert seq not in self.store.replicas and left.tokens % SIZE == 0
            for key in chain(root_key(FINGERPRINT, b""), ids_of(seq, left.tokens), SIZE):
                assert self.store._pool.find(key, BLOCK) is not None

    @invariant()
    def a_watermark_is_whole_and_its_writer_knows_it(self) -> None:
        for seq, replica in self.store.replicas.items():
            assert len(replica.blocks) == -(-replica.watermark // SIZE) and replica.watermark > 0
            ids = ids_of(seq, replica.watermark)
            assert bytes(replica.token_ids) == ids
            assert self.told[seq, replica.epoch] == replica.watermark
            for number, block in enumerate(replica.blocks):
                if block not in self.poisoned:
                    have = bytes(self.memory[block.offset : block.offset + BLOCK])
                    assert have == content(ids[: (number + 1) * SIZE * TOKEN_BYTES])
        for (seq, epoch), watermark in self.told.items():
            if watermark and epoch == self.epoch[seq]:
                assert seq in self.store.replicas, f"{seq} went, and its writer was not told"

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for reservation, _ in self.pending:
            self.store.cancel(reservation)
            self.store.cancel(reservation)
        for number in list(self.store._leases._out):
            self.store.release(number)
        for replica in list(self.store.replicas.values()):
            self.store.end(End(replica.seq, replica.epoch, replica.incarnation))
        assert self.store.used_bytes == self.store.cached_bytes, "leaked"
        while self.store._pool.evict():
            pass
        assert self.store.free_extents() == [(0, len(self.memory))]


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
