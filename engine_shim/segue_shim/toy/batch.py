"""What the toy engine does in each step: who runs, in which blocks, what is computed.

Owns the requests and the free blocks; no model, no daemon, no clock. Blocks that are freed are the first to
be handed out again, and a sequence that finds none takes them from the youngest (which is preempted and
computed again later), as in real engines. Invariant: a block belongs to one request at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from segue_core.messages.request import Replication
from segue_shim.toy.model import BLOCK_SIZE

Emit = Callable[[list[int], str], None]
"""Called with new output ids and a finish_reason (empty: it goes on)."""


@dataclass(eq=False)
class Request:
    """One generation. `seq`: empty if it is not protected. `resume`: a replica may be near.

    `prompt` and `output` together are what is known, KV of the first `computed` tokens is in `blocks`.
    `delivered`: output that was there when it came; it is said again before anything new.
    """

    prompt: list[int]
    max_tokens: int
    emit: Emit
    seed: int = -1
    seq: str = ""
    epoch: int = 0
    resume: bool = False
    replication: Replication = "normal"
    delivered: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    told: int = 0
    """Of the known ids, those that the daemon was told; `begun`: in which blocks it started, too."""
    begun: bool = False
    asked: bool = False
    said_again: bool = False
    over: bool = False

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output


@dataclass(frozen=True)
class Work:
    """One request's part of a step: compute up to `upto` tokens, in blocks of which `new` are fresh."""

    request: Request
    upto: int
    new: list[int]


class Batch:
    """All requests of the engine. `chunk`: most tokens that one request computes in a step."""

    def __init__(self, num_blocks: int, *, chunk: int, max_running: int) -> None:
        self.num_blocks = num_blocks
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.preemptions = 0
        self._chunk = chunk
        self._max_running = max_running
        self._free = list(range(num_blocks))

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def add(self, request: Request) -> None:
        """It waits for its turn."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """It is over, in whatever way; its blocks may be overwritten from the next step on."""
        request.over = True
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._let_go(request)

    def schedule(self) -> tuple[list[Work], list[Request]]:
        """The next step: who computes what, and who was preempted for it."""
        work: list[Work] = []
        preempted: list[Request] = []
        for request in list(self.running):
            if request not in self.running:
                continue
            upto = min(len(request.ids), request.computed + self._chunk)
            need = self._missing(request, upto)
            while need > len(self._free):
                victim = self.running.pop()
                self._let_go(victim)
                self.waiting.appendleft(victim)
                self.preemptions += 1
                preempted.append(victim)
                if victim is request:
                    break
            else:
                work.append(Work(request, upto, self._take(request, need)))
        while not preempted and self.waiting and len(self.running) < self._max_running:
            request = self.waiting[0]
            if self._missing(request, len(request.ids) + 1) > len(self._free):
                break
            self.running.append(self.waiting.popleft())
            upto = min(len(request.ids), self._chunk)
            work.append(Work(request, upto, self._take(request, self._missing(request, upto))))
        return work, preempted

    def grow(self, work: Work, upto: int) -> Work:
        """The same up to more tokens, which are in a replica; unchanged if there are no blocks for them."""
        need = self._missing(work.request, upto)
        if upto <= work.upto or need > len(self._free):
            return work
        more = self._take(work.request, need)
        return Work(work.request, upto, work.new + more)

    def _missing(self, request: Request, tokens: int) -> int:
        return max(0, -(-tokens // BLOCK_SIZE) - len(request.blocks))

    def _take(self, request: Request, count: int) -> list[int]:
        new = [self._free.pop() for _ in range(count)]
        request.blocks += new
        return new

    def _let_go(self, request: Request) -> None:
        self._free += request.blocks
        request.blocks = []
        request.computed = 0
        request.begun = False
        request.asked = False
