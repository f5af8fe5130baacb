"""The router's part: starts requests, notices dead and stuck engines, promotes elsewhere, goes on there.

Also the clients that have no router: their engine names sequences by itself, from the same count in each
life, always under epoch 1, so that one name means other content after a restart. Invariant: an epoch is
never used twice for one sequence; ids that were delivered are never taken back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simulation.clockwork import MS, Process, Violation

if TYPE_CHECKING:
    from simulation.world import World

LOOK_MS = 12
PROMOTE_WAIT_MS = 15
PROMOTE_TIMEOUT_MS = 50
MAX_CLIENTS = 6


@dataclass(eq=False)
class Client:
    """One request and its stream. `engine` and `engine_life`: who answers it now."""

    seq: str
    salt: bytes
    delivered: list[int]
    length: int
    epoch: int = 1
    engine: int = 0
    engine_life: int = 0
    moving: bool = False
    used: list[tuple[int, int]] = field(default_factory=list)


class Router(Process):
    """See the module. It never dies here."""

    def __init__(self, world: World) -> None:
        super().__init__("router")
        self.world = world
        self.alive = True
        self.closing = False
        self.clients: dict[str, Client] = {}
        self._count = 0
        self._local: list[tuple[str, int]] = []
        world.after(0, self, self._look)

    # -- clients ------------------------------------------------------------------------------

    def _arrive(self) -> None:
        world = self.world
        up = [engine for engine in world.engines if engine.alive]
        if not up:
            return
        engine = world.rng.choice(up)
        length = world.rng.choice((6, 12, 20, 30))
        self._count += 1
        if world.chance(0.25):
            name = f"local{engine.number}-{engine.local_requests}"
            engine.local_requests += 1
            ids = [*world.prompt(), engine.incarnation % 50]
            world.after(world.between(0.1, 1), engine, engine.start, name, 1, b"", ids)
            self._local.append((name, engine.number))
            return
        client = Client(f"s{self._count}", world.rng.choice((b"", b"", b"tenant")), world.prompt(), length)
        client.length += len(client.delivered)
        self.clients[client.seq] = client
        self._run_at(client, engine.number)

    def _run_at(self, client: Client, number: int) -> None:
        engine = self.world.engines[number]
        client.moving, client.engine, client.engine_life = False, number, engine.life
        client.used.append((number, client.epoch))
        ids = list(client.delivered)
        delay = self.world.between(0.1, 1)
        self.world.after(delay, engine, engine.start, client.seq, client.epoch, client.salt, ids)

    def tokens(self, seq: str, epoch: int, ids: list[int]) -> None:
        """An engine streamed; who is not the sequence's engine any more has lost its client."""
        client = self.clients.get(seq)
        if client is None or client.moving or epoch != client.epoch:
            return
        if ids[: len(client.delivered)] != client.delivered[: len(ids)]:
            raise Violation(f"{seq}: what was delivered is taken back")
        if len(ids) > len(client.delivered):
            client.delivered = ids
        if len(client.delivered) >= client.length:
            self._finish(client)

    def _finish(self, client: Client) -> None:
        del self.clients[client.seq]
        for number, epoch in client.used:
            self._abort(number, client.seq, epoch)

    def _abort(self, number: int, seq: str, epoch: int) -> None:
        engine = self.world.engines[number]
        self.world.after(self.world.between(0.1, 40), engine, engine.abort, seq, epoch)

    def finish_all(self) -> None:
        """Everybody hangs up."""
        self.closing = True
        for client in list(self.clients.values()):
            self._finish(client)
        for seq, number in self._local:
            self._abort(number, seq, 1)

    # -- failures -----------------------------------------------------------------------------

    def _look(self) -> None:
        world = self.world
        world.after(LOOK_MS * MS, self, self._look)
        if self.closing:
            return
        if not world.calm and len(self.clients) < MAX_CLIENTS and world.chance(0.5):
            self._arrive()
        if self._local and not world.calm and world.chance(0.05):
            seq, number = self._local.pop(world.rng.randrange(len(self._local)))
            self._abort(number, seq, 1)
        for client in list(self.clients.values()):
            engine = world.engines[client.engine]
            dead = not engine.alive or engine.life != client.engine_life
            stuck = engine.stopped and world.chance(0.3)
            if not client.moving and (dead or stuck or world.chance(world.draining)):
                self._move(client)

    def _move(self, client: Client) -> None:
        world = self.world
        if not client.moving:
            world.say("router: {} leaves {}", client.seq, world.engines[client.engine].name)
            self._abort(client.engine, client.seq, client.epoch)
            daemon = world.daemons[client.engine]
            if world.chance(0.7):
                world.after(world.between(0.1, 2), daemon, daemon.fence, client.seq, client.epoch + 1)
        client.moving = True
        client.epoch += 1
        up = [n for n, engine in enumerate(world.engines) if engine.alive and world.daemons[n].alive]
        if up:
            held = {n: world.held(n, client.seq) for n in up}
            best = max(up, key=lambda n: (held[n], n != client.engine))
            number = best if world.chance(0.8) else world.rng.choice(up)
            client.engine = number
            daemon, want = world.daemons[number], len(client.delivered) - 1
            deadline = world.now + PROMOTE_WAIT_MS * MS
            world.after(
                world.between(0.1, 1), daemon, daemon.promote, client.seq, client.epoch, want, deadline
            )
        world.after(PROMOTE_TIMEOUT_MS * MS, self, self._not_promoted, client, client.epoch)

    def promoted(self, seq: str, epoch: int, watermark: int | None) -> None:
        """A daemon answered a promotion."""
        client = self.clients.get(seq)
        if client is None or not client.moving or client.epoch != epoch:
            return
        if watermark is None:
            self._move(client)
        else:
            self._run_at(client, client.engine)

    def _not_promoted(self, client: Client, epoch: int) -> None:
        if self.clients.get(client.seq) is client and client.moving and client.epoch == epoch:
            self._move(client)
