"""Placement in a group: the daemon beside rank 0 decides for all ranks, the others obey. Pure.

A copy is worth nothing unless the ranks of one peer engine hold all of it, so one daemon decides. The leader
sees each peer as its weakest rank does: usable if it is usable to all, with the least room, refused if one is
refused. A follower without a word about a sequence places it nowhere: without rank 0 nothing can be restored,
and where the leader would have put it nobody can know. What it was told stays until it is told otherwise,
also while the leader is away, or was started again and has no peer to place it at yet.

Invariants: a follower holds a sequence where the leader said last, or nowhere; a follower that has joined is
told of every sequence that has a holder, and of every change after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from segue_core.messages.peer import PeerView, TurnedAway, Word
from segue_daemon.placement import Move, Placed, Placement

MAX_TOLD = 100_000
"""Sequences that a follower keeps a word about, and of which a leader keeps one untold."""
MAX_WORDS = 256
MAX_TURNED_AWAY = 256
"""Of one message; the rest goes with the next."""


@dataclass(frozen=True)
class Own:
    """What this rank knows itself of a peer that it is connected to."""

    host: str
    zone: str
    room: dict[str, Any] | None = None


class LeadingPlacement(Placement):
    """At rank 0 of `ranks`. `changed` is called when there is something to tell."""

    def __init__(self, peers: Iterable[str], *, ranks: int, **options: Any) -> None:
        super().__init__(peers, **options)
        self.changed: Callable[[], None] = lambda: None
        self._ranks = ranks
        self._own: dict[str, Own] = {}
        self._views: dict[int, dict[str, PeerView]] = {}
        self._turned: dict[int, dict[tuple[str, str], int]] = {}
        self._untold: dict[int, dict[str, None]] = {}

    # -- what is heard of peers here ----------------------------------------------------------

    def up(self, name: str, *, host: str = "", zone: str = "") -> None:
        self._own[name] = Own(host, zone)
        self._combine(name)

    def room(self, name: str, free_bytes: int, **more: Any) -> None:
        own = self._own.get(name)
        if own is not None:
            self._own[name] = Own(own.host, own.zone, {"free_bytes": free_bytes, **more})
            self._combine(name)

    def lost(self, name: str, now_ns: int) -> None:
        self._own.pop(name, None)
        super().lost(name, now_ns)

    def accepted(self, seq: str, name: str) -> None:
        if not any((seq, name) in turned for turned in self._turned.values()):
            super().accepted(seq, name)

    def _combine(self, name: str) -> None:
        """The peer is there if it is there for all ranks."""
        own = self._own.get(name)
        views = [views[name] for views in self._views.values() if name in views and views[name].up]
        if own is None or len(views) != self._ranks - 1:
            return
        if not self.peers[name].connected:
            super().up(name, host=own.host, zone=own.zone)
        if own.room is not None:
            rooms = [(own.room["free_bytes"], own.room.get("budget_bytes", 0))]
            free, budget = min([*rooms, *((view.free_bytes, view.budget_bytes) for view in views)])
            link_ms = max([own.room.get("link_ms", 0.0), *(view.link_ms for view in views)])
            said = {"free_bytes": free, "budget_bytes": budget, "link_ms": link_ms}
            super().room(name, **(own.room | said))

    # -- what followers say -------------------------------------------------------------------

    def joined(self, rank: int, now_ns: int) -> None:
        """The daemon of `rank` is here, perhaps again: it knows nothing of what it was told."""
        self.left(rank, now_ns)
        self._untold[rank] = {seq: None for seq, placed in self._placed.items() if placed.holders}

    def follows(self, rank: int) -> bool:
        """Whether it is told everything."""
        return rank in self._untold

    def left(self, rank: int, now_ns: int) -> None:
        """It is gone, or its peers are not known any more: no peer is there for all ranks."""
        self._untold.pop(rank, None)
        self._views.pop(rank, None)
        self._refused(rank, {})
        for name in self.peers:
            self._missing(name, now_ns)

    def reported(
        self, rank: int, views: Sequence[PeerView], turned: Sequence[TurnedAway], now_ns: int
    ) -> None:
        """What it sees of its peers now."""
        if rank not in self._untold:
            return
        self._views[rank] = {view.name: view for view in views}
        for name in self.peers:
            view = self._views[rank].get(name)
            if view is None or not view.up:
                self._missing(name, now_ns)
            self._combine(name)
        self._refused(rank, {(each.seq, each.peer): each.need_bytes for each in turned})

    def _missing(self, name: str, now_ns: int) -> None:
        if self.peers[name].connected:
            super().lost(name, now_ns)

    def _refused(self, rank: int, turned: dict[tuple[str, str], int]) -> None:
        before, self._turned[rank] = self._turned.get(rank, {}), turned
        for (seq, name), need_bytes in turned.items():
            if (seq, name) not in before and name in self.peers:
                self.refused(seq, name, need_bytes)
        for seq, name in before.keys() - turned.keys():
            self.accepted(seq, name)

    # -- what followers are told --------------------------------------------------------------

    def words(self, rank: int) -> tuple[Word, ...]:
        """The next of what `rank` has not been told; it counts as told now."""
        untold = self._untold.get(rank, {})
        return tuple(self._word(untold) for _ in range(min(len(untold), MAX_WORDS)))

    def _word(self, untold: dict[str, None]) -> Word:
        seq = next(iter(untold))
        del untold[seq]
        placed = self._placed.get(seq)
        return Word(seq, tuple(placed.holders) if placed is not None else ())

    def _note(self, seq: str) -> None:
        for rank, untold in list(self._untold.items()):
            untold[seq] = None
            if len(untold) > MAX_TOLD:
                del self._untold[rank]  # it has to join again
        self.changed()

    def holders(self, seq: str) -> tuple[str, ...]:
        new = seq not in self._placed
        found = super().holders(seq)
        if new and found:
            self._note(seq)
        return found

    def review(self, live: Iterable[str], now_ns: int) -> list[Move]:
        moves = super().review(live, now_ns)
        for move in moves:
            self._note(move.seq)
        return moves

    def forget(self, seq: str) -> None:
        if seq in self._placed:
            super().forget(seq)
            self._note(seq)


class FollowingPlacement(Placement):
    """At any other rank."""

    def __init__(self, peers: Iterable[str], **options: Any) -> None:
        super().__init__(peers, **options)
        self._told: dict[str, tuple[str, ...]] = {}
        self._unsure: set[str] = set()
        """What is placed here by words from before the leader was joined last: it may have been over there
        meanwhile, and then nobody will say so."""
        self._budgets: dict[str, int] = {}

    def joined(self) -> None:
        """The leader says it all again, but takes nothing back of what is over since."""
        self._told = {seq: peers for seq, peers in self._told.items() if seq in self._placed}
        self._unsure = set(self._told)

    def told(self, words: Iterable[Word]) -> None:
        """Where the leader wants sequences; said twice, it changes nothing."""
        for word in words:
            self._unsure.discard(word.seq)
            if word.peers and (word.seq in self._told or len(self._told) < MAX_TOLD):
                self._told[word.seq] = tuple(name for name in word.peers if name in self.peers)
            elif word.seq in self._placed:
                self._told[word.seq] = ()
            else:
                self._told.pop(word.seq, None)
            if word.seq in self._placed:
                self._dirty[word.seq] = None

    def views(self) -> tuple[PeerView, ...]:
        """The peers as this rank sees them."""
        return tuple(
            PeerView(peer.name, peer.usable, peer.free_bytes, self._budgets.get(peer.name, 0), peer.link_ms)
            for peer in self.peers.values()
        )

    def turned_away(self) -> tuple[TurnedAway, ...]:
        """What peers had no room for, at this rank."""
        found: list[TurnedAway] = []
        for seq in self._turned_away:
            placed = self._placed[seq]
            found += [TurnedAway(seq, name, placed.need_bytes) for name in placed.refused]
            if len(found) >= MAX_TURNED_AWAY:
                break
        return tuple(found[:MAX_TURNED_AWAY])

    def room(self, name: str, free_bytes: int, **more: Any) -> None:
        self._budgets[name] = more.get("budget_bytes", 0)
        super().room(name, free_bytes, **more)

    def review(self, live: Iterable[str], now_ns: int) -> list[Move]:
        moves = super().review(live, now_ns)
        self.moves -= sum(not move.dropped for move in moves)  # the first word of a sequence moves nothing
        return moves

    def forget(self, seq: str) -> None:
        super().forget(seq)
        if seq in self._unsure or not self._told.get(seq, ("",)):
            self._unsure.discard(seq)
            self._told.pop(seq, None)  # the leader has forgotten it before

    def _fill(self, seq: str, placed: Placed) -> None:
        for name in self._told.get(seq, ()):
            if name not in placed.holders:
                placed.holders.append(name)
                self.peers[name].assigned += 1

    def _replace(self, seq: str) -> Move | None:
        placed = self._placed.get(seq)
        if placed is None:
            return None
        before = tuple(placed.holders)
        for name in before:
            if name not in self._told.get(seq, ()):
                placed.holders.remove(name)
                self._admit(seq, placed, name)
                self.peers[name].assigned -= 1
        self._fill(seq, placed)
        dropped = tuple(name for name in before if name not in placed.holders)
        added = tuple(name for name in placed.holders if name not in before)
        return Move(seq, dropped, added) if dropped or added else None
