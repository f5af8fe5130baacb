"""Placement: which peers hold the replicas of which sequence. Pure: no I/O; time is passed in.

Peers are ranked by whether they have room, whether they are on another host than the engine and the other
holders, whether they have an engine that could go on, whether they are in another zone; then by a rendezvous
hash weighted by free room, load and measured link: one engine's sequences spread over its peers, more of them
where there is more to give.

Invariants: a sequence never has a holder on its engine's host, or two on one, while a usable peer with room
elsewhere has none of it; else it keeps its holders while they are usable and take its bytes; a holder that
was lost keeps its sequences for `grace_ns`, and beyond that until there is somebody else.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

LINK_HALF_MS = 100.0
"""A peer with this lag counts half as much as one without."""
FULL_BELOW = 0.05
"""A peer that refused for lack of room gets nothing new until this part of its budget is free."""


@dataclass
class Peer:
    """What is known of a peer. `usable`: connected, and it has said what room it has. `assigned`: copies
    placed there from here; `running`: its own engine's sequences; `serving`: it has a living engine, which
    could take over."""

    name: str
    host: str = ""
    zone: str = ""
    connected: bool = False
    usable: bool = False
    lost_ns: int | None = None
    given_up: bool = False
    full: bool = False
    free_bytes: int = 0
    running: int = 0
    serving: bool = True
    link_ms: float = 0.0
    assigned: int = 0

    @property
    def weight(self) -> float:
        """How much it has to give: room, shared by those who work there, over a link so slow."""
        return (
            max(1, self.free_bytes) / (1 + self.running + self.assigned) / (1 + self.link_ms / LINK_HALF_MS)
        )

    def score(self, seq: str) -> float:
        """Weighted rendezvous hashing (Schindelhauer, Schomaker 2005): the highest score gets `seq`; shares
        are proportional to weights, and a change of one weight moves only what it wins or loses."""
        digest = hashlib.blake2b(f"{self.name} {seq}".encode(), digest_size=8).digest()
        return self.weight / -math.log((int.from_bytes(digest) + 1) / (2**64 + 2))


@dataclass
class Placed:
    """Where one sequence is. `refused`: holders that had no room for it; `need_bytes`: what it takes."""

    holders: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    need_bytes: int = 0


@dataclass(frozen=True)
class Move:
    """`seq` is to end at the peers `dropped` and to go, from its start, to those `added`."""

    seq: str
    dropped: tuple[str, ...]
    added: tuple[str, ...]


class Placement:
    """Decides for one daemon. A peer without a label for its host or zone counts as being elsewhere."""

    def __init__(
        self,
        peers: Iterable[str],
        *,
        host: str = "",
        zone: str = "",
        replicas: int = 1,
        grace_ns: int = 2_000_000_000,
    ) -> None:
        self.peers = {name: Peer(name) for name in peers}
        self.replicas = replicas
        self.moves = 0
        self._grace_ns = grace_ns
        self.labels = (host, zone)
        self._placed: dict[str, Placed] = {}
        self._turned_away: dict[str, None] = {}
        self._dirty: dict[str, None] = {}
        self._missed: set[str] = set()
        """Placed, but nobody spoke for them when they were to be looked at: looked at when somebody does."""
        self._all_dirty = False

    # -- what is heard of peers ---------------------------------------------------------------

    def up(self, name: str, *, host: str = "", zone: str = "") -> None:
        """A link to `name` stands; it is usable once it has said what room it has."""
        peer = self.peers[name]
        peer.host, peer.zone = host, zone
        peer.connected, peer.usable, peer.lost_ns, peer.given_up, peer.full = True, False, None, False, False

    def room(
        self,
        name: str,
        free_bytes: int,
        *,
        budget_bytes: int = 0,
        running: int = 0,
        serving: bool = True,
        link_ms: float = 0.0,
    ) -> None:
        """A sign of life: the peer's free room, of how much, its engine's load, how slow the link is."""
        peer = self.peers[name]
        if not peer.connected:
            return
        peer.free_bytes, peer.running, peer.serving, peer.link_ms = free_bytes, running, serving, link_ms
        if not peer.usable:
            peer.usable = self._all_dirty = True
        if peer.full and free_bytes > FULL_BELOW * budget_bytes:
            peer.full = False
            self._all_dirty = True
        self._dirty.update(self._turned_away)

    def lost(self, name: str, now_ns: int) -> None:
        """The link to `name` is down."""
        peer = self.peers[name]
        peer.connected = peer.usable = False
        if peer.lost_ns is None:
            peer.lost_ns = now_ns

    def refused(self, seq: str, name: str, need_bytes: int) -> None:
        """`name` has no room for `seq`, which takes about `need_bytes`."""
        self.peers[name].full = True
        placed = self._placed.get(seq)
        if placed is not None and name in placed.holders:
            placed.refused.add(name)
            placed.need_bytes = need_bytes
            self._turned_away[seq] = self._dirty[seq] = None

    def accepted(self, seq: str, name: str) -> None:
        """`name` took something of `seq`: a refusal before that is over."""
        if seq in self._turned_away:
            self._admit(seq, self._placed[seq], name)

    def _admit(self, seq: str, placed: Placed, name: str) -> None:
        placed.refused.discard(name)
        if not placed.refused:
            self._turned_away.pop(seq, None)

    # -- where sequences are ------------------------------------------------------------------

    def holders(self, seq: str) -> tuple[str, ...]:
        """The peers that are to hold `seq`; it is placed now if it has not been."""
        placed = self._placed.get(seq)
        if placed is None:
            placed = self._placed[seq] = Placed()
            self._fill(seq, placed)
        return tuple(placed.holders)

    def holds(self, seq: str, name: str) -> bool:
        """Whether `name` is to hold `seq`."""
        placed = self._placed.get(seq)
        if seq in self._missed:
            self._missed.discard(seq)
            self._dirty[seq] = None
        return name in (placed.holders if placed is not None else self.holders(seq))

    def forget(self, seq: str) -> None:
        """The sequence is over."""
        placed = self._placed.pop(seq, None)
        self._turned_away.pop(seq, None)
        self._dirty.pop(seq, None)
        self._missed.discard(seq)
        for name in placed.holders if placed is not None else ():
            self.peers[name].assigned -= 1

    # -- re-placing ---------------------------------------------------------------------------

    def due(self, now_ns: int) -> bool:
        """Whether something happened that may move sequences."""
        return self._all_dirty or bool(self._dirty) or any(self._over(p, now_ns) for p in self.peers.values())

    def _over(self, peer: Peer, now_ns: int) -> bool:
        return peer.lost_ns is not None and not peer.given_up and now_ns - peer.lost_ns >= self._grace_ns

    def review(self, live: Iterable[str], now_ns: int) -> list[Move]:
        """Which of the sequences `live` move now, because of what was heard since the last review."""
        for peer in self.peers.values():
            if self._over(peer, now_ns):
                peer.given_up = self._all_dirty = True
        due = self._placed.keys() if self._all_dirty else self._dirty.keys() & self._placed.keys()
        names = [seq for seq in live if seq in due]
        self._missed.update(due - set(names))
        self._all_dirty = False
        self._dirty.clear()
        moves = [move for seq in names if (move := self._replace(seq)) is not None]
        self.moves += len(moves)
        return moves

    def _replace(self, seq: str) -> Move | None:
        placed = self._placed.get(seq)
        if placed is None:
            return None
        before = tuple(placed.holders)
        for name in before:
            if self._better_elsewhere(seq, placed, name):
                placed.holders.remove(name)
                self._admit(seq, placed, name)
                self.peers[name].assigned -= 1
        self._fill(seq, placed)
        after = placed.holders
        dropped = tuple(name for name in before if name not in after)
        added = tuple(name for name in after if name not in before)
        return Move(seq, dropped, added) if dropped or added else None

    def _better_elsewhere(self, seq: str, placed: Placed, name: str) -> bool:
        """Whether `name` should give `seq` up, and somebody can take it."""
        peer = self.peers[name]
        best = self._choose(seq, placed, beside=name)
        if best is None:
            return False
        if peer.given_up:
            return True
        rank = self._rank(best, placed, beside=name)
        if rank[0]:
            return False
        return name in placed.refused or rank[1] < self._rank(peer, placed, beside=name)[1]

    def _fill(self, seq: str, placed: Placed) -> None:
        while len(placed.holders) < self.replicas:
            best = self._choose(seq, placed)
            if best is None:
                return
            placed.holders.append(best.name)
            best.assigned += 1

    def _choose(self, seq: str, placed: Placed, beside: str = "") -> Peer | None:
        """The best peer that has none of `seq`; `beside`: a holder that it would stand in for."""
        candidates = [p for p in self.peers.values() if p.usable and p.name not in placed.holders]
        if not candidates:
            return None
        return min(candidates, key=lambda p: (*self._rank(p, placed, beside), -p.score(seq)))

    def _rank(self, peer: Peer, placed: Placed, beside: str = "") -> tuple[bool, bool, bool, bool]:
        """(no room, shares a host, no engine, shares a zone) with the engine or the holders but `beside`."""
        others = [self.peers[name] for name in placed.holders if name not in (beside, peer.name)]
        hosts = {self.labels[0], *(other.host for other in others)}
        zones = {self.labels[1], *(other.zone for other in others)}
        no_room = peer.full or peer.free_bytes < placed.need_bytes
        same_host, same_zone = peer.host != "" and peer.host in hosts, peer.zone != "" and peer.zone in zones
        return no_room, same_host, not peer.serving, same_zone

    @property
    def copies(self) -> int:
        """Copies that are placed, of all sequences known here."""
        return sum(peer.assigned for peer in self.peers.values())
