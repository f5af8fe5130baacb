"""Scenario: asynchronous scheduling. Steps are scheduled before the ids of the last one are known."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ahead import schedule_ahead
from engine import Driver, make_engine, prompt
from exact import Asker
from exact_kv_run import SETTINGS, Case
from journal_run import CROWDED, WORKLOAD, Watcher
from reference import Reference

from support.daemon_stub import DaemonStub

TOGETHER = ["chunked", "prefix-a", "prefix-b", "aligned"]


def main(model: str, folder: str) -> None:
    report: dict[str, Any] = {}
    schedule_ahead()
    socket = f"{folder}/daemon.sock"
    llm = make_engine(model, socket, **CROWDED)
    core = llm.llm_engine.engine_core.engine_core
    report["engine"] = [type(core.scheduler).__name__, core.batch_queue is not None]

    # Several at once, in chunks, in a cache that is too small for all.
    driver = Driver(llm)
    expected = {name: driver.generate(*WORKLOAD[name]) for name in TOGETHER}
    stub = DaemonStub(socket, arena_bytes=4 << 20)
    registration = stub.registered()
    watcher = Watcher(registration)
    for name in TOGETHER:
        driver.add(name, *WORKLOAD[name], seq=name, epoch=1)
    driver.add("aborted", prompt(8, 50), 200, seq="aborted", epoch=1)
    ahead: set[int] = set()

    def each_step() -> None:
        watcher()
        live = registration.ledger.sequences.values()
        ahead.update(known.computed - len(known.token_ids) for known in live if known.computed)

    driver.run(each_step, steps=60)
    driver.abort("aborted")
    driver.run(each_step)
    ledger = registration.ledger
    report["together"] = {
        "equal": {name: driver.outputs[name] == expected[name] for name in TOGETHER},
        "errors": watcher.errors(Reference(model)),
        "missing": {
            name: len(WORKLOAD[name][0]) + WORKLOAD[name][1] - len(watcher.tokens[name]) for name in TOGETHER
        },
        "ahead": max(ahead),
        "paused": sorted(watcher.paused),
        "changed": watcher.changed,
        "problems": ledger.problems,
        "left": sorted(ledger.sequences),
    }

    # Answers that go on from a replica, or from one that was promised and does not come.
    asker = Asker(llm)
    for name, setting in SETTINGS.items():
        llm.reset_prefix_cache()
        stub.answer = None
        case = Case(asker, stub, registration, setting)
        llm.reset_prefix_cache()
        report[name] = {"loaded": case.go_on()}
        llm.reset_prefix_cache()
        case.replica.lease_ms = -1
        report[name]["failed"] = case.go_on(together=3)
        case.replica.lease_ms = 10_000
        case.replica.extents_given = [case.replica.junk_at] * len(case.replica.extents)
        llm.reset_prefix_cache()
        report[name]["junk"] = case.go_on()
    Path(folder, "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
