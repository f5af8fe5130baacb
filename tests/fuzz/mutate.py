"""Frames that are nearly right: valid messages, then something wrong in their values, order or bytes.

Pure: a seed decides everything. Knows nothing of what it mutates beyond msgpack, JSON and bytes.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

INTEGERS = (
    *(0, 1, 2, 3, 7, 8, 64, 127, 128, 255, 256, 1023, 4096, 65535, 65536, 1 << 20, 1 << 24),
    *((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 53, (1 << 62) - 1, 1 << 62),
    *((1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2, -(1 << 31), -(1 << 63)),
)
TEXTS = (
    "",
    "x",
    "s0",
    "s1",
    "a" * 64,
    "a" * 129,
    "a" * 5000,
    "\0",
    "\n",
    "é",
    "\U0001f600",
    "..",
    "%s{0}",
    "-1",
)
RARE = 0.02
DEEP = 3000
"""Deeper than any decoder goes."""


class Mutator:
    """Everything from one seed."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # -- whole messages -----------------------------------------------------------------------

    def message(self, message: msgspec.Struct) -> bytes:
        """`message` in msgpack: as it is, with wrong values, or with wrong bytes."""
        raw = msgspec.msgpack.encode(message)
        roll = self.rng.random()
        if roll < 0.3:
            return raw
        if roll < 0.75:
            return self.packed(self.tree(msgspec.msgpack.decode(raw)))
        return self.octets(raw)

    def packed(self, tree: Any) -> bytes:
        """A tree in msgpack; what msgpack cannot say becomes nothing."""
        try:
            return msgspec.msgpack.encode(tree)
        except (OverflowError, ValueError, RecursionError):
            return b"\xc0"

    def json(self, body: Any) -> bytes:
        """`body` in JSON: as it is, with wrong values, or with wrong bytes."""
        raw = msgspec.json.encode(body)
        roll = self.rng.random()
        if roll < 0.25:
            return raw
        if roll < 0.7:
            return msgspec.json.encode(self.tree(msgspec.json.decode(raw)))
        if roll < 0.8:
            return self._json_number(raw)
        return self.octets(raw)

    def _json_number(self, raw: bytes) -> bytes:
        """Another spelling of one of its values, which a tree cannot hold."""
        spelled = (b"1e999", b"-0", b"NaN", b"9" * 30, b"9" * 400, b"9" * 5000, b"1.0", b'"\\ud800"')
        at = raw.rfind(b":", 0, self.rng.randrange(len(raw)) + 1) + 1
        end = min((e for e in (raw.find(b",", at), raw.find(b"}", at)) if e >= 0), default=len(raw))
        return raw[:at] + self.rng.choice(spelled) + raw[end:]

    # -- values -------------------------------------------------------------------------------

    def tree(self, tree: Any) -> Any:
        """`tree` with one to three nodes changed."""
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            tree = self._change(tree)
        return tree

    def _change(self, node: Any) -> Any:
        if isinstance(node, list) and node and self.chance(0.85):
            index = self.rng.randrange(len(node))
            return [*node[:index], self._change(node[index]), *node[index + 1 :]]
        if isinstance(node, dict) and node and self.chance(0.85):
            key = self.rng.choice(list(node))
            return node | {key: self._change(node[key])}
        return self._another(node)

    def _another(self, node: Any) -> Any:
        """Something else in the place of `node`: mostly of its type."""
        if self.chance(0.15):
            return self.anything()
        if isinstance(node, bool) or node is None:
            return self.rng.choice((True, False, None, 0, 1))
        if isinstance(node, int):
            return self.integer(node)
        if isinstance(node, bytes):
            return self.octets(node)
        if isinstance(node, str):
            return self.text(node)
        if isinstance(node, list):
            return self._list(node)
        if isinstance(node, dict):
            return self._object(node)
        return self.anything()

    def integer(self, near: int = 0) -> int:
        """One at a limit, or next to `near`."""
        if self.chance(0.4):
            return max(-(1 << 63), min((1 << 64) - 1, near + self.rng.choice((-1, 1, -8, 8, near))))
        return self.rng.choice(INTEGERS)

    def text(self, near: str = "") -> str:
        return self.rng.choice((*TEXTS, near, near + near, near[:-1]))

    def anything(self) -> Any:
        """A value of any type."""
        kinds = (None, True, 0.5, [], {}, b"", self.integer(), self.text(), [[]], {"a": []}, [0] * 5)
        if self.chance(RARE):
            return nested(self.rng.choice((3, 30, 500)))
        return self.rng.choice(kinds)

    def _list(self, node: list[Any]) -> list[Any]:
        roll = self.rng.randrange(6)
        if roll == 0:
            return []
        if roll == 1:
            return node[:-1]
        if roll == 2:
            return node + node
        if roll == 3:
            return node * (1000 if self.chance(RARE) else 20)
        if roll == 4:
            return self.rng.sample(node, len(node))
        return [*node, self.anything()]

    def _object(self, node: dict[Any, Any]) -> dict[Any, Any]:
        if node and self.chance(0.5):
            without = self.rng.choice(list(node))
            return {key: value for key, value in node.items() if key != without}
        return node | {self.text(): self.anything()}

    # -- bytes --------------------------------------------------------------------------------

    def octets(self, raw: bytes) -> bytes:
        """`raw` with flipped bits, cut, grown, doubled, or with another length in it."""
        data = bytearray(raw)
        at = self.rng.randrange(len(data) + 1)
        roll = self.rng.randrange(9)
        if roll <= 1 and data:
            for _ in range(self.rng.choice((1, 1, 2, 8))):
                data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        elif roll == 2:
            del data[at:]
        elif roll == 3:
            data[at:at] = self.rng.randbytes(self.rng.choice((1, 2, 4, 8, 64)))
        elif roll == 4:
            data[at:at] = data[at // 2 : at]
        elif roll == 5:
            wide = self.rng.choice((1, 2, 4, 8))
            data[at : at + wide] = (self.integer() % (1 << 8 * wide)).to_bytes(
                wide, self.rng.choice(("big", "little"))
            )
        elif roll == 6:
            data[at : at + 5] = self.rng.choice((b"\xdd", b"\xc6", b"\xdb", b"\xdf")) + b"\xff\xff\xff\xff"
        elif roll == 7:
            del data[at : at + self.rng.choice((1, 4, 16))]
        elif self.chance(RARE):
            data[at:at] = self.rng.choice((b"\x91", b"[", b'{"a":')) * DEEP
        return bytes(data)

    def cuts(self, data: bytes) -> list[bytes]:
        """`data` in pieces, cut anywhere."""
        pieces, at = [], 0
        while at < len(data):
            step = self.rng.choice((1, 3, 17, 100, 1000, 100_000))
            pieces.append(data[at : at + step])
            at += step
        return pieces


def nested(depth: int) -> list[Any]:
    """Lists in lists."""
    tree: list[Any] = []
    for _ in range(depth):
        tree = [tree]
    return tree
