"""Faults planted on purpose, each a few lines over the code under test: what the simulation must find.

A fault is a function that patches classes through pytest's `monkeypatch`; `SEEDS_NEEDED` says within how many
seeds it must have been caught. The simulation has no knowledge of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from segue_core import content_key
from segue_core.messages.peer import Delta, Nack, NackReason
from segue_daemon import ledger, replicas, store
from segue_daemon.blocks import BlockPool
from segue_daemon.differ import Differ
from segue_daemon.hold import HoldBack
from segue_daemon.kept import OwnKeep
from segue_daemon.ledger import Sequence
from segue_daemon.planner import Planner
from segue_daemon.replicas import Refusal, Replica
from segue_daemon.shipment import Shipment
from segue_daemon.slot_map import SlotMap
from segue_daemon.store import ReplicaStore
from simulation.link import SimLink
from simulation.receiver import SimReceiver

Patch = pytest.MonkeyPatch


def promote_without_fence(patch: Patch) -> None:
    """A promotion says what is held and lets the old writer go on."""

    def promote(self: ReplicaStore, seq: str, epoch: int, now_ns: int = 0) -> int | None:
        replica = self.replicas.get(seq)
        return replica.watermark if replica else 0

    patch.setattr(ReplicaStore, "promote", promote)


def fence_only_on_reserve(patch: Patch) -> None:
    """The fence is not looked at again once a delta's bytes are there."""
    commit = ReplicaStore.commit

    def unfenced(self: ReplicaStore, reservation: Any, *values: Any) -> int | Refusal:
        reservation.delta = msgspec.structs.replace(reservation.delta, epoch=1 << 62)
        return commit(self, reservation, *values)

    patch.setattr(ReplicaStore, "commit", unfenced)


def keep_what_is_not_computed(patch: Patch) -> None:
    """Of a dead engine's sequences all that is known is kept, computed or not."""
    next_delta = OwnKeep._next_delta

    def generous(self: OwnKeep, session: Any, sequence: Sequence, base: int) -> Any:
        computed, sequence.computed = sequence.computed, min(sequence.known, 4 * len(sequence.blocks))
        try:
            return next_delta(self, session, sequence, base)
        finally:
            sequence.computed = computed

    patch.setattr(OwnKeep, "_next_delta", generous)


def skip_checksum(patch: Patch) -> None:
    """What arrives is believed."""
    patch.setattr(SimReceiver, "verified", lambda *_: True)


def skip_copy_then_check(patch: Patch) -> None:
    """A copy is sent although its blocks may have changed hands during it."""

    def gullible(self: Differ, sequence: Sequence, _: Any) -> bool:
        return self._ledger.sequences.get(sequence.seq) is sequence

    patch.setattr(Differ, "still_good", gullible)


def skip_the_hold_back(patch: Patch) -> None:
    """A copy of an engine without notice is sent although nobody has confirmed it yet."""
    patch.setattr(HoldBack, "settled", lambda self, _: next(iter(self._held.values()), None))


def any_incarnation_is_welcome(patch: Patch) -> None:
    """A delta of another life of the engine continues a replica."""

    def same_writer(replica: Replica, delta: Delta) -> bool:
        return (replica.epoch, replica.fingerprint, replica.salt) == (
            delta.epoch,
            delta.fingerprint,
            delta.salt,
        )

    patch.setattr(store, "same_writer", same_writer)


def ack_what_was_sent(patch: Patch) -> None:
    """What went out counts as verified."""
    sent = Planner.sent

    def optimistic(self: Planner, sequence: Sequence, upto: int, *values: Any) -> None:
        sent(self, sequence, upto, *values)
        self.progress[sequence.seq].acked = upto

    patch.setattr(Planner, "sent", optimistic)


def forget_the_pin(patch: Patch) -> None:
    """A lease does not hold its blocks."""
    patch.setattr(BlockPool, "pin", lambda *_: None)
    patch.setattr(BlockPool, "unpin", lambda *_: None)


def apply_a_gap(patch: Patch) -> None:
    """A delta that begins behind the watermark counts as if nothing were missing."""
    reserve = ReplicaStore.reserve

    def generous(self: ReplicaStore, delta: Delta, *values: Any) -> Any:
        replica = self.replicas.get(delta.seq)
        if replica is not None and replicas.same_writer(replica, delta) and delta.base > replica.watermark:
            missing = 4 * (delta.base - replica.watermark)
            if -(-delta.base // delta.block_size) == len(replica.blocks):
                replica.token_ids += bytes(missing)
        return reserve(self, delta, *values)

    patch.setattr(ReplicaStore, "reserve", generous)


def key_without_parent(patch: Patch) -> None:
    """A block is named by its own ids alone, whatever came before it."""
    block_key = content_key.block_key

    def orphan(parent: bytes, token_ids: bytes | memoryview) -> bytes:
        return block_key(b"", token_ids)

    for module in (content_key, ledger, replicas):
        patch.setattr(module, "block_key", orphan)


def key_without_salt(patch: Patch) -> None:
    """Tenants share blocks."""
    root_key = content_key.root_key
    for module in (ledger, replicas, store):
        patch.setattr(module, "root_key", lambda fingerprint, salt: root_key(fingerprint, b""))


def ignore_key_unknown(patch: Patch) -> None:
    """The writer does not hear that a block was dropped."""
    nacked = Shipment.nacked

    def deaf(self: Shipment, nack: Nack, *values: Any) -> None:
        if nack.reason != NackReason.KEY_UNKNOWN:
            nacked(self, nack, *values)

    patch.setattr(Shipment, "nacked", deaf)


def stale_shadow(patch: Patch) -> None:
    """After a rewind the old copy of the tail is still taken for what the peer has."""
    patch.setattr(Differ, "rewind", lambda *_: None)


def leave_out_the_newest_token(patch: Patch) -> None:
    """What is left out of a tail because it belongs to later slots is one slot too much."""
    later = SlotMap.later
    patch.setattr(SlotMap, "later", lambda self, slots: later(self, slots - 1))


def ship_uncomputed_tokens(patch: Patch) -> None:
    """What is known is sent, computed or not."""
    patch.setattr(Sequence, "shippable", property(lambda self: min(self.known, len(self.blocks) * 4)))


def leak_reservations(patch: Patch) -> None:
    """The room of a delta that did not arrive whole is not given back."""
    patch.setattr(ReplicaStore, "cancel", lambda *_: None)


def ignore_ends(patch: Patch) -> None:
    """Replicas of ended sequences stay."""
    patch.setattr(ReplicaStore, "end", lambda *_: None)


def ends_are_said_once(patch: Patch) -> None:
    """An end that was under way when the connection broke is not said again."""
    welcomed = SimLink._welcomed

    def forgetful(self: SimLink, *values: Any) -> None:
        self.ends.said.clear()
        welcomed(self, *values)

    patch.setattr(SimLink, "_welcomed", forgetful)


def send_what_is_kept_back(patch: Patch) -> None:
    """What its client keeps back is sent like anything else."""
    patch.setattr(Sequence, "replicated", property(lambda _: True))


SEEDS_NEEDED: dict[Callable[[Patch], None], int] = {
    promote_without_fence: 10,
    fence_only_on_reserve: 150,
    keep_what_is_not_computed: 80,
    skip_checksum: 20,
    skip_copy_then_check: 100,
    skip_the_hold_back: 60,
    any_incarnation_is_welcome: 150,
    ack_what_was_sent: 10,
    forget_the_pin: 10,
    apply_a_gap: 20,
    key_without_parent: 10,
    key_without_salt: 10,
    ignore_key_unknown: 300,
    stale_shadow: 150,
    leave_out_the_newest_token: 20,
    ship_uncomputed_tokens: 10,
    leak_reservations: 20,
    ignore_ends: 10,
    ends_are_said_once: 50,
    send_what_is_kept_back: 12,
}
