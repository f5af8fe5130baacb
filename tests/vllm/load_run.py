"""Scenario: a replica is loaded and the answer goes on; and everything that can be wrong with a replica."""

from __future__ import annotations

import json
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import torch
from engine import Driver, make_engine, prompt

from segue_core.clock import MonotonicClock
from segue_core.messages.local import Match, Matched
from segue_shim.options import ExporterOptions
from support.clocks import AdvancedClock
from support.daemon_stub import DaemonStub, Registration, ids, wait_until

PROMPT = prompt(11, 100)
DELIVERED, TOTAL, BLOCK = 45, 80, 32
MATCH_TIMEOUT_MS = 50
PAUSE_MS = ExporterOptions().match_pause_ms + 1
"""After a failure the daemon is not asked for so long."""


class Replica:
    """KV of a sequence in the stub's arena, its blocks out of order; answers matches as told."""

    def __init__(self, stub: DaemonStub, registration: Registration, seq: str) -> None:
        known = registration.ledger.sequences[seq]
        self.registration = registration
        self.computed = known.computed
        self.token_ids = known.token_ids
        self.block_bytes = registration.message.geometry.block_bytes
        count = -(-known.computed // BLOCK)
        places = [(7 * number + 3) % 11 for number in range(count)]
        self.extents = [place * self.block_bytes for place in places]
        for extent, block in zip(self.extents, known.block_ids, strict=False):
            stub.arena[extent : extent + self.block_bytes] = registration.block(block)
        self.junk_at = 12 * self.block_bytes
        # Finite numbers: a NaN would stay in slots that a later request masks but does not overwrite.
        junk = torch.randn(self.block_bytes // 4).view(torch.uint8)
        stub.arena[self.junk_at : self.junk_at + self.block_bytes] = bytes(junk.tolist())
        self.lease = 100
        self.tokens = self.computed
        self.lease_ms = 10_000
        self.extents_given = self.extents

    def answer(self, match: Match) -> Matched:
        self.lease += 1
        tokens = min(self.tokens, match.limit)
        extents = self.extents_given[match.computed // BLOCK : -(-tokens // BLOCK)]
        return Matched(
            request=match.request,
            tokens=tokens,
            first_block=match.computed // BLOCK,
            extents=array("Q", extents).tobytes(),
            lease=self.lease,
            deadline_ns=MonotonicClock().now_ns() + self.lease_ms * 1_000_000,
        )


def clock_of_questions(llm: Any) -> AdvancedClock:
    """By which the scheduler asks its daemon from now on; nothing else in the engine goes by it."""
    matches = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler._client
    clock = AdvancedClock()
    for each in (matches, *matches._clients):
        each._clock = clock
    return clock


def main(model: str, folder: str) -> None:
    report: dict[str, Any] = {}
    socket = f"{folder}/daemon.sock"
    stub = DaemonStub(socket, arena_bytes=4 << 20)
    llm = make_engine(
        model,
        socket,
        num_gpu_blocks_override=41,
        enable_prefix_caching=False,
        extra={"match_timeout_ms": MATCH_TIMEOUT_MS},
    )
    clock = clock_of_questions(llm)
    driver = Driver(llm)
    registration = stub.registered()

    driver.add("first", PROMPT, TOTAL, seq="answer", epoch=1)
    while len(driver.outputs.get("first", ())) < DELIVERED:
        driver.step()
        registration.ledger.drain()
    replica = Replica(stub, registration, "answer")
    driver.run()
    whole = driver.outputs["first"]
    continued, rest = PROMPT + whole[:DELIVERED], whole[DELIVERED:]
    report["computed_after_45"] = replica.computed
    epoch = iter(range(2, 1000))

    def resume() -> dict[str, Any]:
        """The rest of the answer, as a standby would give it."""
        name = f"resume-{len(driver.outputs)}"
        releases = len(stub.releases)
        driver.add(name, continued, TOTAL - DELIVERED, seq="answer", epoch=next(epoch), resume=True)
        began = time.monotonic()
        driver.step()
        took = time.monotonic() - began
        driver.run()
        return {
            "equal": driver.outputs[name] == rest,
            "cached": driver.cached[name],
            "releases": [(release.lease, release.loaded) for release in stub.releases[releases:]],
            "first_step_s": took,
        }

    stub.answer = replica.answer
    report["loaded"] = resume()
    match = stub.matches[-1]
    report["question"] = {
        "right": (match.seq, match.epoch, match.computed, match.limit, match.salt)
        == ("answer", 2, 0, len(continued) - 1, b""),
        "token_ids": ids(match.token_ids) == continued,
        "fingerprint": match.fingerprint == registration.message.fingerprint,
        "same_engine": stub.attached[-1].incarnation == registration.message.incarnation,
    }

    replica.tokens = 70
    report["partly"] = resume()
    replica.tokens = replica.computed

    replica.extents_given = [replica.junk_at] * len(replica.extents)
    report["junk"] = resume()

    replica.extents_given = [len(stub.arena)] * len(replica.extents)
    report["outside"] = resume()
    replica.extents_given = replica.extents

    replica.lease_ms = -1
    report["expired"] = resume()
    replica.lease_ms = 10_000
    report["after_expired"] = resume()

    stub.answer = lambda match: Matched(match.request, match.limit + 1, 0, b"", 9, 1 << 62)
    report["nonsense"] = resume()
    clock.advance_ms(PAUSE_MS)
    stub.answer = lambda match: b"\x05\x00\x00\x00hello"
    report["garbage"] = resume()
    clock.advance_ms(PAUSE_MS)
    stub.answer = None
    report["silent"] = resume()
    report["silent_again"] = resume()
    clock.advance_ms(PAUSE_MS)
    stub.answer = replica.answer
    report["recovered"] = resume()

    # Another daemon's arena, offered in the moment in which the worker has not registered with it yet.
    stub.kill()
    stub = DaemonStub(socket, arena_bytes=4 << 20, incarnation=78, on_register=lambda message: None)
    stub.answer = replica.answer
    report["other_daemon"] = resume()
    stub.kill()
    stub = DaemonStub(socket, arena_bytes=4 << 20, incarnation=79)
    stub.answer = replica.answer
    wait_until(lambda: stub.registrations, 10)

    # Bugs of the shim itself: contained, and never at the price of wrong KV.
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from segue_shim import loader, vllm_scheduler

    def fail(*args: Any) -> None:
        raise RuntimeError("made to fail")

    copy, loader.Loader.copy = loader.Loader.copy, fail
    report["loader_bug"] = resume()
    loader.Loader.copy = copy
    exporter = get_kv_transfer_group()._worker._exporter
    report["exporter_broken"] = exporter.broken
    exporter.broken = False
    vllm_scheduler.SchedulerHalf.after_alloc = fail
    report["scheduler_bug"] = resume()
    report["after_bug"] = resume()
    Path(folder, "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
