"""Scenario: an engine of two ranks (tensor parallel), each with a daemon of its own, and what they hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from engine import make_engine
from exact import Asker, different
from exact_kv_run import SETTINGS
from load_run import DELIVERED, PROMPT, TOTAL, Replica

from support.daemon_stub import DaemonStub, Registration

RANKS = 2
MATCH_TIMEOUT_MS = 2_000


class Case:
    """One kind of answer, whole, and its replica, a part a rank."""

    def __init__(
        self, asker: Asker, stubs: list[DaemonStub], registrations: list[Registration], name: str
    ) -> None:
        self.asker, self.stubs, self.registrations = asker, stubs, registrations
        self.settings = {"max_tokens": TOTAL, "ignore_eos": True} | SETTINGS[name]
        self.seq, self.epoch = name, 1
        request = asker.add(PROMPT, self.settings, seq=name, epoch=1)
        while len(asker.answer(request).get("ids", ())) < DELIVERED:
            self.step()
        self.replicas = [
            Replica(stub, registration, name) for stub, registration in zip(stubs, registrations, strict=True)
        ]
        self.step_until_idle()
        self.whole = asker.answer(request)
        self.answer_all()

    def answer_all(self) -> None:
        for stub, replica in zip(self.stubs, self.replicas, strict=True):
            stub.answer = replica.answer
            replica.tokens, replica.lease_ms = replica.computed, 10_000

    def step(self) -> None:
        self.asker.step()
        for registration in self.registrations:
            registration.ledger.drain()

    def step_until_idle(self) -> None:
        while self.asker.engine.has_unfinished_requests():
            self.step()

    def claimed(self) -> list[int]:
        """Tokens that each rank says are in its memory."""
        return [registration.ledger.sequences[self.seq].computed for registration in self.registrations]

    def go_on(self, together: int = 1) -> dict[str, Any]:
        """Continue the answer, once or several times in one batch."""
        releases = [len(stub.releases) for stub in self.stubs]
        delivered = [{"ids": self.whole["ids"][:DELIVERED]}]
        names = []
        for number in range(together):
            self.epoch += 1
            seq = self.seq if number == 0 else f"{self.seq}-{number}"
            segue = {"seq": seq, "epoch": self.epoch, "resume": True}
            names.append(self.asker.add(PROMPT, self.settings, delivered=delivered, **segue))
        self.step()
        first = self.claimed()
        self.step()
        second = self.claimed()
        self.step_until_idle()
        self.answer_all()
        return {
            "different": [different(self.whole, self.asker.answer(name), DELIVERED) for name in names],
            "loaded": [
                [release.loaded for release in stub.releases[before:]]
                for stub, before in zip(self.stubs, releases, strict=True)
            ],
            "cached": self.asker.pieces[names[0]][-1]["cached"],
            "claimed": [first, second],
        }


def main(model: str, folder: str) -> None:
    stubs = [
        DaemonStub(f"{folder}/{rank}.sock", arena_bytes=4 << 20, incarnation=70 + rank)
        for rank in range(RANKS)
    ]
    llm = make_engine(
        model,
        f"{folder}/{{rank}}.sock",
        tensor_parallel_size=RANKS,
        distributed_executor_backend="mp",
        num_gpu_blocks_override=41,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        extra={"match_timeout_ms": MATCH_TIMEOUT_MS},
    )
    asker = Asker(llm)
    registrations = [stub.registered(timeout_s=60) for stub in stubs]
    messages = [registration.message for registration in registrations]
    report: dict[str, Any] = {
        "ranks": [(message.rank, message.ranks) for message in messages],
        "alike": len({(message.fingerprint, message.incarnation) for message in messages}) == 1,
        "exact": [list(message.exact) for message in messages],
    }
    for name in SETTINGS:
        case = Case(asker, stubs, registrations, name)
        blocks = [
            registration.block(registration.ledger.sequences[name].block_ids[0])
            if name in registration.ledger.sequences
            else stub.arena[replica.extents[0] : replica.extents[0] + replica.block_bytes]
            for stub, registration, replica in zip(stubs, registrations, case.replicas, strict=True)
        ]
        found = report[name] = {"parts differ": blocks[0] != blocks[1], "loaded": case.go_on()}
        case.replicas[1].tokens = 70
        found["least"] = case.go_on()
        case.replicas[1].lease_ms = -1
        found["failed at rank 1"] = case.go_on(together=2)
    stubs[1].answer = None  # last: a daemon that was silent is left alone for a while
    report["rank 1 silent"] = case.go_on()
    report["problems"] = [registration.ledger.problems for registration in registrations]
    Path(folder, "report.json").write_text(json.dumps(report))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
