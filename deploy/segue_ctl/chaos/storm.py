"""A storm from its calm beginning to its calm end: clients, faults, and the search for what is left over.

Owns the order: a first round of streams without a fault, a census, faults until enough answers have moved,
then everything is whole again, the last streams end, and what the processes hold is waited for to be what it
was.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator

import msgspec

from segue_core.messages.request import PARAMS_KEY, SegueParams
from segue_ctl import cluster_checks as checks
from segue_ctl.chaos.census import Files, grown, held, open_files, total, words
from segue_ctl.chaos.crowd import Ask, Crowd, lengths
from segue_ctl.chaos.director import Director, Say
from segue_ctl.chaos.figures import Figures
from segue_ctl.chaos.plan import UNTOUCHED_ENGINES, Weather, proposals
from segue_ctl.chaos.reference import UNSEEDED, VOCABULARY, continuation, text_of
from segue_ctl.chaos.stage import MODEL, Stage
from segue_ctl.chaos.tally import Tally, percentile
from segue_ctl.openai_stream import ask
from segue_ctl.waiting import ClusterError, wait_for

SETTLE_S = 90.0
"""How long after the last stream daemons may still hold something: a writer that is lost is given up after
one minute."""
LAST_STREAMS_S = 120.0
PROGRESS_S = 5.0
LONG_STORM = 200
"""From so many failovers on, sockets are counted too: before and after, idle HTTP connections are waited
for."""
KEPT_ALIVE_S = 18.0


def toy_asks(seed: int) -> Iterator[Ask]:
    """What the crowd asks of toy engines, for ever: prompts of random tokens, some with the beginning of
    another; half of them greedy, half with a seed."""
    chance = random.Random(seed)  # noqa: S311 - repeatable, not secret
    shared = [chance.randrange(VOCABULARY) for _ in range(64)]
    number = 0
    while True:
        size, count = lengths(chance)
        prompt = [chance.randrange(VOCABULARY) for _ in range(size)]
        if chance.random() < 0.25:
            prompt = shared + prompt
        own_seed = chance.randrange(1 << 31) if chance.random() < 0.5 else None
        number += 1
        yield toy_ask(number, prompt, count, own_seed)


def toy_ask(number: int, prompt: list[int], count: int, seed: int | None) -> Ask:
    """One request, and what the answer to it must be."""
    body = {"model": MODEL.name, "prompt": prompt, "max_tokens": count}
    body |= {"temperature": 0} if seed is None else {"temperature": 1, "seed": seed}

    def expected() -> tuple[list[int], str]:
        ids = continuation(prompt, count, UNSEEDED if seed is None else seed)
        return ids, text_of(ids)

    return Ask(number, body, expected)


class Storm:
    """Over the cluster of `stage`. `asks`: what clients ask; `weather`: which faults come, and how often;
    `uncounted`: how the names of processes begin whose open files are their own affair; `say_fault`: told of
    each fault."""

    def __init__(
        self,
        stage: Stage,
        asks: Iterator[Ask],
        *,
        seed: int,
        streams: int,
        weather: Weather,
        uncounted: str = "-",
        say: Say,
        say_fault: Say,
    ) -> None:
        self.tally = Tally()
        self._stage = stage
        self._asks = asks
        self._seed = seed
        self._streams = streams
        self._say = say
        self._uncounted = uncounted
        self._kinds_uncounted: tuple[str, ...] = ()
        plan = proposals(seed, stage.engines, wired=stage.wired, weather=weather)
        untouched = min(UNTOUCHED_ENGINES, len(stage.engines) - 1)
        self._director = Director(stage, plan, untouched=untouched, say=say_fault)
        self._leaked_replicas = 0
        self._leaked: Files = {}
        self._left_behind: list[str] = []
        self._counters: dict[str, int] = {}
        self._storm_s = self._settle_s = 0.0
        self._reached = False

    async def run(self, *, failovers: int, deadline: float) -> None:
        """On a cluster that has started. Raises ClusterError if something does not come up again."""
        await self._first_round()
        self._kinds_uncounted = () if failovers >= LONG_STORM else ("socket",)
        if not self._kinds_uncounted:
            await asyncio.sleep(KEPT_ALIVE_S)
        before = self._files()
        began = time.monotonic()
        crowd = self._crowd()
        clients = asyncio.create_task(crowd.run())
        teller = asyncio.create_task(self._tell(crowd, failovers, began))
        try:
            await self._director.run(
                lambda: self.tally.failovers >= failovers or time.monotonic() > deadline or clients.done()
            )
            self._storm_s = time.monotonic() - began
            self._reached = self.tally.failovers >= failovers
            crowd.stop()
            await self._until_whole()
            async with asyncio.timeout(LAST_STREAMS_S):
                await clients
        except TimeoutError:
            self._left_behind.append(f"{crowd.running} streams that do not end")
        except ClusterError as error:
            self._say(str(error))
            self._left_behind.append(str(error).partition("\n")[0])
        finally:
            for task in (teller, clients):
                task.cancel()
            await asyncio.gather(teller, clients, return_exceptions=True)
        await self._settle(before)

    def figures(self) -> Figures:
        """What came of it."""
        tally, gaps = self.tally, self.tally.gaps_ms
        return Figures(
            failovers=tally.failovers,
            streams=tally.streams,
            lost_tokens=tally.lost,
            repeated_tokens=tally.repeated,
            unequal_streams=tally.unequal,
            failed_streams=tally.failed,
            gap_ms_p50=round(percentile(gaps, 0.5), 1),
            gap_ms_p99=round(percentile(gaps, 0.99), 1),
            gap_ms_max=round(max(gaps, default=0.0), 1),
            leaked_replicas=self._leaked_replicas,
            leaked_fds=total(self._leaked),
            tokens=tally.tokens,
            moved_streams=tally.moved_streams,
            recomputed_tokens=tally.recomputed,
            kv_loads=self._counters.get("loads", 0),
            verified_kv_bytes=self._counters.get("loaded_kv_bytes", 0),
            failed_loads=self._counters.get("failed_loads", 0),
            preemptions=self._counters.get("preemptions", 0),
            memory_high_water_bytes=dict(sorted(self._director.high_water.items())),
            faults=dict(self._director.faults),
            detected_by=dict(tally.causes),
            ways=dict(tally.ways),
            errors=dict(tally.errors),
            leaked_fd_kinds=words(self._leaked),
            left_behind=tuple(self._left_behind),
            examples=tuple(tally.examples),
            untold_streams=tally.untold,
            engines=len(self._stage.engines),
            seed=self._seed,
            duration_s=round(self._storm_s, 1),
            settle_s=round(self._settle_s, 1),
            reached=self._reached,
        )

    def _crowd(self) -> Crowd:
        cluster = self._stage.cluster
        return Crowd(
            cluster.session,
            cluster.router_url(),
            self._asks,
            self.tally,
            streams=self._streams,
            say=self._say,
        )

    async def _first_round(self) -> None:
        """One stream a client, with no fault, and one for each engine that looks for a replica: what is
        opened once is open after it."""
        crowd = self._crowd()
        crowd.stop()
        await crowd.run()
        cluster = self._stage.cluster
        for name in self._stage.engines:
            one, params = next(self._asks), SegueParams(seq=f"storm-{name}", epoch=1, resume=True)
            body = one.body | {"kv_transfer_params": {PARAMS_KEY: msgspec.to_builtins(params)}}
            await ask(cluster.session, f"{cluster.engine_url(name)}{one.path}", body)
        await self._until_empty()

    async def _tell(self, crowd: Crowd, failovers: int, began: float) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            await self._director.look()
            tally, faults = self.tally, self._director.faults
            self._say(
                f"{time.monotonic() - began:.0f} s: {tally.failovers} of {failovers} failovers, "
                f"{sum(faults.values())} faults ({faults['engine_kill']} engines killed), "
                f"{tally.streams} streams over, {crowd.running} running; "
                f"lost {tally.lost}, repeated {tally.repeated}, "
                f"not equal {tally.unequal}, failed {tally.failed}"
            )

    async def _until_whole(self) -> None:
        """Every engine registered and in use, every daemon linked."""
        cluster = self._stage.cluster
        for name in self._stage.engines:
            await cluster.wait_registered(name)
        await cluster.wait_linked()
        await cluster.wait_router()

    async def _settle(self, before: Files) -> None:
        """Wait until nothing is held that was not before; what is after SETTLE_S has leaked."""
        began = time.monotonic()
        await self._director.look()
        self._counters = dict(await self._director.engine_counters())
        self._leaked_replicas = await self._until_empty()
        self._leaked = await self._until_closed(before)
        self._settle_s = time.monotonic() - began
        sockets = {file.name for file in self._stage.cluster.folder.glob("*.sock")}
        extra = sockets - {f"{name}.sock" for name in self._stage.engines}
        self._left_behind += sorted(f"socket {name}" for name in extra)

    async def _until_closed(self, before: Files) -> Files:
        """Wait until no process has more files open than `before`; what there is more of after SETTLE_S."""
        left: Files = {}

        async def missing() -> str:
            nonlocal left
            left = grown(before, self._files())
            return words(left)

        try:
            await wait_for("files are closed", missing, timeout_s=SETTLE_S)
        except ClusterError as error:
            self._say(str(error))
        return left

    async def _until_empty(self) -> int:
        """Wait until daemons hold nothing; how much they do after SETTLE_S."""
        left = 0

        async def missing() -> str:
            nonlocal left
            cluster = self._stage.cluster
            statuses = [
                await checks.daemon_status(cluster.session, cluster.daemon_url(name))
                for name in self._stage.engines
            ]
            unknown = [status for status in statuses if isinstance(status, str)]
            left = held(status for status in statuses if not isinstance(status, str))
            return "; ".join(unknown) or (f"{left} replicas and leases are held" if left else "")

        try:
            await wait_for("daemons hold nothing", missing, timeout_s=SETTLE_S)
        except ClusterError as error:
            self._say(str(error))
        return left

    def _files(self) -> Files:
        pids = {n: pid for n, pid in self._stage.pids().items() if not n.startswith(self._uncounted)}
        files = {name: open_files(pid) for name, pid in pids.items()}
        for kinds in files.values():
            for kind in self._kinds_uncounted:
                del kinds[kind]  # a Counter does not mind what it does not have
        return files
