"""The simulated engine's block allocator: free list, users, and what sealed blocks are still known for.

Invariant: a block is handed out only while nobody uses it, and forgets then what it was known for.
"""

from __future__ import annotations

from simulation.content import SIZE


class EngineBlocks:
    """`free`: blocks without users, in the order in which they came free; what they hold may be shared."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count))
        self._users = [0] * count
        self._cached: dict[bytes, int] = {}
        self._cached_as: dict[int, bytes] = {}

    def shared(self, kv: list[bytes]) -> list[int]:
        """Blocks of the longest known prefix, held once more; at least one token is left to compute."""
        found: list[int] = []
        for end in range(SIZE, len(kv), SIZE):
            block = self._cached.get(kv[end - 1])
            if block is None:
                break
            if not self._users[block]:
                self.free.remove(block)
            self._users[block] += 1
            found.append(block)
        return found

    def take(self, *, oldest: bool) -> int:
        """A free block; `oldest`: the one that has been free for longest, else the last one."""
        block = self.free.pop(0 if oldest else -1)
        self._users[block] += 1
        name = self._cached_as.pop(block, None)
        if name is not None:
            del self._cached[name]
        return block

    def give_back(self, block: int) -> None:
        """One user less."""
        self._users[block] -= 1
        if not self._users[block]:
            self.free.append(block)

    def remember(self, blocks: list[int], kv: list[bytes], computed: int) -> None:
        """The full blocks among `computed` tokens may be shared from now on."""
        for end in range(SIZE, computed + 1, SIZE):
            name, block = kv[end - 1], blocks[end // SIZE - 1]
            if name not in self._cached and block not in self._cached_as:
                self._cached[name], self._cached_as[block] = block, name
