"""Scenario: what a daemon learns from the journal and the shared pages, against an independent model."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from engine import Driver, make_engine, prompt
from reference import Reference, paged_kv

from segue_core.ring import Word
from support.daemon_stub import DaemonStub, Registration, page_tensor

SHARED = prompt(1, 80)
WORKLOAD = {
    "short": (prompt(2, 20), 40),
    "chunked": (prompt(3, 150), 40),
    "prefix-a": (SHARED + prompt(4, 10), 60),
    "prefix-b": (SHARED + prompt(5, 40), 60),
    "prefix-c": (SHARED + prompt(6, 1), 50),
    "aligned": (prompt(7, 64), 64),
}
CROWDED: dict[str, Any] = {
    "num_gpu_blocks_override": 21,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "enable_prefix_caching": True,
}
"""An engine that takes long prompts in chunks, and whose cache is too small for all of these."""


class Watcher:
    """After each step: does the KV that the daemon may ship stay what it was, and grow as told?"""

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self.kv: dict[str, torch.Tensor] = {}
        self.tokens: dict[str, list[int]] = {}
        self.changed: list[str] = []
        self.paused: set[str] = set()
        self.ended: set[str] = set()
        self.most_at_once = 0

    def __call__(self) -> None:
        ledger = self.registration.ledger
        for record in ledger.drain():
            self.paused |= set(getattr(record, "paused", ()))
            self.ended |= set(getattr(record, "ended", ()))
        page = page_tensor(self.registration, 0, torch.float32)
        geometry = self.registration.message.geometry
        progressing = 0
        for seq, known in ledger.sequences.items():
            # What may be shipped: an engine that schedules ahead computes a token before its id is told.
            shippable = min(known.computed, len(known.token_ids))
            if not shippable:
                continue
            progressing += 1
            kv = paged_kv(page, geometry, known.block_ids, shippable)
            before = self.kv.get(seq)
            common = min(before.shape[1], kv.shape[1]) if before is not None else 0
            if before is not None and not torch.allclose(before[:, :common], kv[:, :common], atol=1e-3):
                self.changed.append(f"{seq} at {shippable}")
            if before is None or kv.shape[1] >= before.shape[1]:
                self.kv[seq] = kv
                self.tokens[seq] = known.token_ids[:shippable]
        self.most_at_once = max(self.most_at_once, progressing)

    def errors(self, reference: Reference) -> dict[str, float]:
        """Largest difference from the independent model, by sequence."""
        return {seq: float((reference.kv(self.tokens[seq]) - kv).abs().max()) for seq, kv in self.kv.items()}


def main(model: str, folder: str) -> None:
    report: dict[str, Any] = {}
    socket = f"{folder}/run/daemon.sock"
    llm = make_engine(model, socket, **CROWDED)
    driver = Driver(llm)

    # No daemon, not even its folder: the engine serves. These are the answers to compare with.
    expected = {name: driver.generate(ids, count) for name, (ids, count) in WORKLOAD.items()}
    report["varied"] = len(set(expected["aligned"]))

    # A daemon comes. Several sequences at once.
    Path(folder, "run").mkdir()
    stub = DaemonStub(socket)
    began = time.monotonic()
    registration = stub.registered()
    report["registered_after_s"] = time.monotonic() - began
    watcher = Watcher(registration)
    for number, (name, (ids, count)) in enumerate(WORKLOAD.items()):
        driver.add(name, ids, count, seq=name, epoch=1)
        driver.add(f"plain-{name}", prompt(100 + number, 40), 20)
    driver.add("aborted", prompt(8, 50), 200, seq="aborted", epoch=1)
    driver.run(watcher, steps=60)
    driver.abort("aborted")
    driver.run(watcher)
    reference = Reference(model)
    report["first"] = {
        "equal": {name: driver.outputs[name] == expected[name] for name in WORKLOAD},
        "errors": watcher.errors(reference),
        "tokens": {name: len(watcher.tokens[name]) for name in watcher.tokens},
        "wanted": {name: len(ids) + count - 1 for name, (ids, count) in WORKLOAD.items()},
        "known_right": {
            name: watcher.tokens[name] == (ids + expected[name])[: len(watcher.tokens[name])]
            for name, (ids, _) in WORKLOAD.items()
        },
        "changed": watcher.changed,
        "paused": sorted(watcher.paused),
        "ended": sorted(watcher.ended),
        "at_once": watcher.most_at_once,
        "left": sorted(registration.ledger.sequences),
        "problems": registration.ledger.problems,
        "words": [
            registration.ring.get(word) for word in (Word.STEP_BEGUN, Word.STEP_COMMITTED, Word.RUNNING)
        ],
        "doorbell": int.from_bytes(os.read(registration.doorbell, 8), "little"),
    }

    # The daemon dies under load and comes back: live sequences are announced anew.
    for name in ("aligned", "chunked"):
        driver.add(f"again-{name}", *WORKLOAD[name], seq=f"again-{name}", epoch=1)
    driver.run(steps=10)
    stub.kill()
    driver.run(steps=10)
    stub = DaemonStub(socket)
    registration = stub.registered()
    watcher = Watcher(registration)
    driver.run(watcher)
    report["again"] = {
        "equal": {name: driver.outputs[f"again-{name}"] == expected[name] for name in ("aligned", "chunked")},
        "errors": watcher.errors(reference),
        "resets": registration.ledger.resets,
        "problems": list(registration.ledger.problems),
        "changed": list(watcher.changed),
    }

    # Two writers of one sequence: siblings of n > 1, a late one, and one with a higher epoch.
    driver.add("siblings", prompt(20, 40), 10, n=2, seq="siblings", epoch=1)
    driver.add("old", prompt(21, 40), 30, seq="contested", epoch=5)
    driver.run(watcher, steps=5)
    driver.add("late", prompt(22, 40), 30, seq="contested", epoch=4)
    driver.run(watcher, steps=5)
    late_epoch = registration.ledger.sequences["contested"].epoch
    driver.add("newer", prompt(23, 40), 30, seq="contested", epoch=6)
    driver.run(watcher, steps=5)
    report["epochs"] = [late_epoch, registration.ledger.sequences["contested"].epoch]
    driver.run(watcher)
    report["after_all"] = {
        "left": sorted(registration.ledger.sequences),
        "problems": registration.ledger.problems,
        "running": registration.ring.get(Word.RUNNING),
    }
    Path(folder, "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
