"""Content keys: the name of a sealed block is what it was computed from.

key(block) = H(key(parent) | token ids of the block), and key(root) = H(fingerprint | salt).
Two blocks with one key hold interchangeable KV: same model, same prefix, same salt.
BLAKE2b with 16 bytes: collisions are out of reach by accident and by intent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

KEY_BYTES = 16
TOKEN_BYTES = 4
"""Token ids travel as little-endian unsigned 32-bit integers."""


def root_key(fingerprint: bytes, salt: bytes) -> bytes:
    """The parent of a sequence's first block: 16 bytes."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"segue-root")
    digest.update(len(fingerprint).to_bytes(4, "little"))
    digest.update(fingerprint)
    digest.update(salt)
    return digest.digest()


def block_key(parent: bytes, token_ids: bytes | memoryview) -> bytes:
    """The key of a sealed block that follows `parent` and holds `token_ids` (block_size * 4 bytes)."""
    digest = hashlib.blake2b(parent, digest_size=KEY_BYTES, person=b"segue-block")
    digest.update(token_ids)
    return digest.digest()


def chain(root: bytes, token_ids: bytes, block_size: int) -> Iterator[bytes]:
    """Keys of every full block of `token_ids` (packed u32), in order; a partial last block has none."""
    step = block_size * TOKEN_BYTES
    view = memoryview(token_ids)
    key = root
    for start in range(0, len(view) - step + 1, step):
        key = block_key(key, view[start : start + step])
        yield key
