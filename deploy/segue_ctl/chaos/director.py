"""The director: does to the cluster what the plan says, and puts right again what it did.

Owns the faults that are going on. It decides nothing (see `plan`) and looks at no stream. Invariant: after
`run` every process runs and every wire is whole.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import cast

from segue_ctl import cluster_checks as checks
from segue_ctl import metrics
from segue_ctl.chaos.census import high_water_bytes
from segue_ctl.chaos.plan import Fault, allowed
from segue_ctl.chaos.stage import Stage
from segue_ctl.chaos.wires import Harm
from segue_ctl.waiting import ClusterError, wait_for

START_S = 240.0
TERM_S = 30.0
PASSED_OVER_S = 0.02
Say = Callable[[str], None]


class Director:
    """Inflicts the faults of `plan` on `stage`; `untouched` engines are always left alone."""

    def __init__(self, stage: Stage, plan: Iterator[Fault], *, untouched: int, say: Say) -> None:
        self.faults: Counter[str] = Counter()
        self.high_water: dict[str, int] = {}
        self.counters: Counter[str] = Counter()
        """Of engines that are gone: the counters they had."""
        self._stage = stage
        self._cluster = stage.cluster
        self._plan = plan
        self._untouched = untouched
        self._say = say
        self._active: dict[Fault, asyncio.Task[None]] = {}

    async def run(self, over: Callable[[], bool]) -> None:
        """One fault after the other until `over`; then everything heals. Raises ClusterError."""
        try:
            while not over():
                fault = next(self._plan)
                self._raise_if_failed()
                if not allowed(fault, self._active, len(self._stage.engines), self._untouched):
                    await asyncio.sleep(PASSED_OVER_S)
                    continue
                self._say(f"{fault.kind} {fault.target} for {fault.hold_ms} ms")
                self._active[fault] = asyncio.create_task(self._inflict(fault))
                await asyncio.sleep(fault.pause_ms / 1000)
            await asyncio.gather(*self._active.values())
        finally:
            for task in self._active.values():
                task.cancel()
            await asyncio.gather(*self._active.values(), return_exceptions=True)

    async def look(self) -> None:
        """Note how much memory every process has had."""
        for name, pid in self._stage.pids().items():
            self._note_memory(name, pid)
        await asyncio.sleep(0)

    async def engine_counters(self) -> Counter[str]:
        """What all engines, also those that are gone, have counted."""
        total = Counter(self.counters)
        for name in self._stage.engines:
            total += await self._counters(name)
        return total

    def _raise_if_failed(self) -> None:
        for fault, task in list(self._active.items()):
            if task.done():
                del self._active[fault]
                task.result()

    async def _inflict(self, fault: Fault) -> None:
        self.faults[fault.kind] += 1
        who, _, what = fault.kind.partition("_")
        if what in ("cut", "hole", "slow"):
            await self._harm_wire(fault, cast(Harm, what))
        elif what == "stop":
            await self._stop(fault)
        elif who == "engine":
            await self._end_engine(fault, kill=what == "kill")
        else:
            await self._kill_daemon(fault)
        if who == "engine":
            await self._until_up(fault.target)

    async def _harm_wire(self, fault: Fault, harm: Harm) -> None:
        wire = self._stage.wires[fault.harms]
        wire.hurt(harm)
        try:
            await asyncio.sleep(fault.hold_ms / 1000)
        finally:
            wire.hurt("")

    async def _stop(self, fault: Fault) -> None:
        name = fault.target if fault.target == "router" else fault.harms.replace(" ", "-")
        child = self._cluster.process(name)
        child.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.hold_ms / 1000)
        finally:
            child.signal(signal.SIGCONT)

    async def _end_engine(self, fault: Fault, *, kill: bool) -> None:
        child = self._cluster.process(f"engine-{fault.target}")
        self.counters += await self._counters(fault.target)
        self._note_memory(child.name, child.pid)
        await asyncio.to_thread(child.note_shared_memory)  # nobody else removes it after SIGKILL
        child.signal(signal.SIGKILL if kill else signal.SIGTERM)
        deadline = time.monotonic() + TERM_S
        while child.alive and time.monotonic() < deadline:  # noqa: ASYNC110 - another process
            await asyncio.sleep(PASSED_OVER_S)
        if child.alive:
            raise ClusterError(f"{child.name} lives {TERM_S:.0f} s after {fault.kind}")
        await asyncio.sleep(fault.hold_ms / 1000)
        await asyncio.to_thread(child.finish, grace_s=0)
        child.start()
        await wait_for(
            f"{child.name} serves again",
            lambda: checks.engine_ready(
                self._cluster.session, self._cluster.engine_url(fault.target), self._cluster.model
            ),
            timeout_s=START_S,
            children=(child,),
        )

    async def _kill_daemon(self, fault: Fault) -> None:
        child = self._cluster.process(f"daemon-{fault.target}")
        self._note_memory(child.name, child.pid)
        child.signal(signal.SIGKILL)
        await asyncio.sleep(fault.hold_ms / 1000)
        await asyncio.to_thread(child.finish, grace_s=0)
        await self._cluster.start_daemon(fault.target)

    async def _until_up(self, engine: str) -> None:
        cluster = self._cluster
        await wait_for(
            f"the router uses engine {engine} again",
            lambda: checks.router_ready(cluster.session, cluster.router_url(), [engine]),
            timeout_s=START_S,
            children=(cluster.process("router"),),
        )

    async def _counters(self, engine: str) -> Counter[str]:
        """The toy's own; none from other engines."""
        try:
            async with asyncio.timeout(0.3):
                text = await metrics.scrape(self._cluster.session, self._cluster.engine_url(engine))
        except TimeoutError:
            return Counter()
        names = (
            "loads",
            "loaded_tokens",
            "loaded_kv_bytes",
            "failed_loads",
            "computed_tokens",
            "preemptions",
        )
        sums = {name: metrics.sum_by_label(text, f"segue_toy_{name}_total").get("", 0) for name in names}
        return Counter({name: int(value) for name, value in sums.items()})

    def _note_memory(self, name: str, pid: int) -> None:
        kind = name.partition("-")[0]
        self.high_water[kind] = max(self.high_water.get(kind, 0), high_water_bytes(pid))
