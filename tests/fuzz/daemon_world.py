"""A real daemon in this process, with a guarded arena, for the targets that come in over its sockets.

`check` holds the store's books against the arena: what is free and what is used make the whole, no
reservation and no lease is forgotten, and every replica is complete up to its watermark.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import xxhash

import segue_daemon.app
from fuzz.guarded import GuardedArena, WriteWatch
from fuzz.target import demand
from segue_core.content_key import TOKEN_BYTES, chain, root_key
from segue_daemon.app import Daemon
from segue_daemon.arena import rounded
from segue_daemon.blocks import Block
from segue_daemon.settings import DaemonSettings

ARENA_BYTES = 1 << 20
WINDOW_BYTES = 1 << 20


class DaemonWorld:
    """One daemon, from `start` to `stop`. `changes` are settings."""

    def __init__(self, **changes: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="segue-fuzz-"))
        tree = {
            "name": "b",
            "socket": str(self.folder / "s"),
            "http": {"port": 0},
            "listen": {"control_port": 0},
            "store": {"budget_bytes": ARENA_BYTES, "lease_ms": 20, "scrub_bytes_per_s": 0},
            "replication": {"window_bytes": WINDOW_BYTES},
            **changes,
        }
        settings = msgspec.convert(tree, DaemonSettings)
        usual = segue_daemon.app.Arena
        segue_daemon.app.Arena = GuardedArena  # type: ignore[misc]
        try:
            self.daemon = Daemon(settings)
        finally:
            segue_daemon.app.Arena = usual  # type: ignore[misc]
        self.store = self.daemon.store
        self.receiver = self.daemon.receiver
        self.watch = WriteWatch(self.daemon._arena.bytes, self.store)

    async def start(self) -> None:
        await self.daemon.start()

    async def stop(self) -> None:
        await self.daemon.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def check(self) -> None:
        """Raise Violation if the store's books are not in order. Nothing may be under way."""
        self.watch.check()
        store, pool = self.store, self.store._pool
        free = store.free_extents()
        demand(
            sum(nbytes for _, nbytes in free) + store.used_bytes == ARENA_BYTES,
            "free and used are not the arena",
        )
        users: Counter[Block] = Counter()
        for replica in store.replicas.values():
            demand(not replica.busy, f"{replica.seq}: a reservation is still open")
            size = replica.block_size
            demand(
                len(replica.blocks) == -(-replica.watermark // size),
                f"{replica.seq}: blocks are not its tokens",
            )
            demand(not len(replica.token_ids) % TOKEN_BYTES, f"{replica.seq}: half a token id")
            root = root_key(replica.fingerprint, replica.salt)
            keys = list(chain(root, bytes(replica.token_ids), size))
            demand(replica.keys[: len(keys)] == keys, f"{replica.seq}: keys do not follow from its ids")
            for key, block in zip(keys, replica.blocks, strict=False):
                demand(
                    block.key in (key, b"") and block.nbytes == replica.block_bytes,
                    f"{replica.seq}: a wrong block",
                )
            users.update(replica.blocks)
        leased: Counter[Block] = Counter(b for lease in store._leases._out.values() for b in lease.blocks)
        known = set(users) | set(leased) | set(pool._by_key.values())
        demand(
            sum(rounded(block.nbytes) for block in known) == store.used_bytes, "used bytes belong to no block"
        )
        for block in known:
            demand(
                block.users == users[block], f"a block has {block.users} users, and {users[block]} replicas"
            )
            demand(block.pins == leased[block], "a block is pinned, and not under a lease")
            if block.checksum is not None:
                sealed = self.daemon._arena.bytes[block.offset : block.offset + block.nbytes]
                demand(xxhash.xxh3_64_intdigest(sealed.data) == block.checksum, "a sealed block changed")
        extents = sorted([(b.offset, rounded(b.nbytes)) for b in known] + free)
        at = 0
        for offset, nbytes in extents:
            demand(offset == at, "extents overlap or leave a hole")
            at += nbytes
