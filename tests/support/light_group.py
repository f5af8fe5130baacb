"""Light engines of several ranks: each rank has pages, a journal and a daemon; all step together."""

from __future__ import annotations

from typing import Any

from segue_shim.match_group import MatchGroup
from segue_shim.options import ExporterOptions
from segue_shim.plan import pack_u32
from support.daemons import DaemonProcess, DaemonSet
from support.light_engine import BLOCK_SIZE, LightEngine, Live
from support.waiting import wait_for


class DaemonGroups:
    """Daemons for engines `names` of `ranks` ranks: those of one rank are each other's peers, those of one
    engine a group whose leader is that of rank 0."""

    def __init__(self, *names: str, ranks: int = 2, **changes: Any) -> None:
        self.ranks = [DaemonSet(*names, **changes) for _ in range(ranks)]
        for rank, daemons in enumerate(self.ranks):
            for name, daemon in daemons.daemons.items():
                group: dict[str, Any] = {"rank": rank, "ranks": ranks}
                if rank:
                    port = self.ranks[0][name].config["listen"]["control_port"]
                    group["leader"] = f"127.0.0.1:{port}"
                daemon.config["group"] = group

    def start(self) -> DaemonGroups:
        """Start all, and wait until the peers of each rank are connected."""
        for daemons in self.ranks:
            for daemon in daemons.daemons.values():
                daemon.start(ready=False)
        for daemons in self.ranks:
            for daemon in daemons.daemons.values():
                wait_for(lambda d=daemon: d.get("/livez")[0] == 200, "daemon answers", timeout_s=60)  # type: ignore[misc]
                wait_for(
                    lambda d=daemon: all(p["connected"] for p in d.status()["peers"]),  # type: ignore[misc]
                    "peers connect",
                    timeout_s=60,
                )
        return self

    def stop(self) -> None:
        """Kill all."""
        for daemons in self.ranks:
            daemons.stop()

    def of(self, name: str) -> list[DaemonProcess]:
        """The daemons of engine `name`, in rank order."""
        return [daemons[name] for daemons in self.ranks]

    def watermarks(self, name: str, seq: str) -> list[int]:
        """What each rank's daemon of engine `name` says of `seq`."""
        return [daemon.watermark(seq) for daemon in self.of(name)]


class LightGroup:
    """A light engine of several ranks."""

    def __init__(self, daemons: DaemonGroups, name: str, *, incarnation: int = 1, **options: Any) -> None:
        sockets = [daemon.socket for daemon in daemons.of(name)]
        self.ranks = [
            LightEngine(socket, name, incarnation=incarnation, rank=rank, ranks=len(sockets), **options)
            for rank, socket in enumerate(sockets)
        ]
        patient = ExporterOptions(match_timeout_ms=5_000)
        self.matches = MatchGroup([engine.client for engine in self.ranks], BLOCK_SIZE, patient)
        wait_for(
            lambda: all(engine.exporter.registered for engine in self.ranks),
            "all ranks registered",
            timeout_s=60,
        )

    def start(self, seq: str, ids: list[int], epoch: int = 1) -> list[Live]:
        """Admit a sequence at every rank."""
        return [engine.start(seq, ids, epoch) for engine in self.ranks]

    def say(self, seq: str, token: int) -> None:
        """One more token of `seq` is known, and computed in a step."""
        for engine in self.ranks:
            engine.live[seq].ids.append(token)
        self.step()

    def step(self) -> None:
        """One forward pass."""
        for engine in self.ranks:
            engine.step()

    def finish(self, seq: str) -> None:
        """The sequence is over."""
        for engine in self.ranks:
            engine.finish(seq)

    def resume(self, seq: str, ids: list[int], epoch: int) -> int:
        """Take a sequence over; returns the tokens that every rank loaded."""
        matched = self.matches.match(
            seq=seq, epoch=epoch, salt=b"", token_ids=pack_u32(ids), computed=0, limit=len(ids) - 1
        )
        if matched is None:
            self.start(seq, ids, epoch)
            return 0
        results = [
            engine.take_over(seq, ids, epoch, matched.tokens, matched.sources) for engine in self.ranks
        ]
        for result in results:
            self.matches.release(result.daemon, result.lease, result.loaded)
        return min(result.loaded for result in results)

    def wrong_tokens(self, seq: str) -> list[int]:
        """Positions whose KV is not what it must be at some rank."""
        return sorted({position for engine in self.ranks for position in engine.wrong_tokens(seq)})

    def close(self) -> None:
        """Hang up."""
        for engine in self.ranks:
            engine.close()
