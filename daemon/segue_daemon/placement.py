"""Which peer holds the replica of a sequence. Pure.

Static so far: rendezvous hashing over the configured peers, one replica a sequence, so that one engine's
sequences spread over all of them and a peer that leaves the configuration moves only its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def holder(seq: str, peers: Sequence[str]) -> str:
    """The name among `peers` (at least one) that holds the replica of `seq`."""
    return max(peers, key=lambda peer: hashlib.blake2b(f"{peer} {seq}".encode(), digest_size=8).digest())
