"""Scenario: continued answers whose KV comes from a replica, or was promised and does not come."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from engine import make_engine
from exact import Asker, different
from load_run import DELIVERED, PROMPT, TOTAL, Replica

from support.daemon_stub import DaemonStub, Registration

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5, "presence_penalty": 0.8},
}


class Case:
    """One kind of answer, whole, and its replica."""

    def __init__(self, asker: Asker, stub: DaemonStub, registration: Registration, setting: Any) -> None:
        self.asker, self.stub = asker, stub
        self.settings = {"max_tokens": TOTAL, "ignore_eos": True} | setting
        self.epoch = 1
        name = asker.add(PROMPT, self.settings, seq="answer", epoch=1)
        registration.ledger.drain()
        while len(asker.answer(name).get("ids", ())) < DELIVERED:
            asker.step()
            registration.ledger.drain()
        self.replica = Replica(stub, registration, "answer")
        asker.run()
        registration.ledger.drain()
        self.whole = asker.answer(name)
        stub.answer = self.replica.answer

    def go_on(self, together: int = 1) -> dict[str, Any]:
        """Continue the answer, once or several times in one batch."""
        releases = len(self.stub.releases)
        delivered = [{"ids": self.whole["ids"][:DELIVERED]}]
        names = []
        for number in range(together):
            self.epoch += 1
            seq = "answer" if number == 0 else f"answer-{number}"
            segue = {"seq": seq, "epoch": self.epoch, "resume": True}
            names.append(self.asker.add(PROMPT, self.settings, delivered=delivered, **segue))
        self.asker.run()
        return {
            "different": [different(self.whole, self.asker.answer(name), DELIVERED) for name in names],
            "loaded": [release.loaded for release in self.stub.releases[releases:]],
            "cached": self.asker.pieces[names[0]][-1]["cached"],
        }


def main(model: str, folder: str) -> None:
    report: dict[str, Any] = {}
    socket = f"{folder}/daemon.sock"
    stub = DaemonStub(socket, arena_bytes=4 << 20)
    llm = make_engine(
        model,
        socket,
        num_gpu_blocks_override=41,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
    )
    asker = Asker(llm)
    registration = stub.registered()
    report["registered"] = [list(registration.message.exact), registration.message.exact_detail]
    for name, setting in SETTINGS.items():
        stub.answer = None
        case = Case(asker, stub, registration, setting)
        report[name] = {"loaded": case.go_on()}
        case.replica.tokens = 70
        report[name]["partly"] = case.go_on()
        case.replica.tokens = case.replica.computed
        case.replica.lease_ms = -1
        report[name]["failed"] = case.go_on()
        report[name]["failed together"] = case.go_on(together=3)
    Path(folder, "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
