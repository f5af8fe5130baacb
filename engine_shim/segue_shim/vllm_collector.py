"""A request's outputs on their way to whoever reads them, kept apart where vLLM (0.32) would merge them.

vLLM's collector merges what its reader has not taken yet. Parsers that were fed token by token must be fed
so again: what comes while the collector `keeps` stays as it is. Bounded by the ids that are said again: all
of them come in one call, and what comes later is merged as ever, only not into them.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from vllm.v1.engine.output_processor import RequestOutputCollector


class SeparateCollector(RequestOutputCollector):
    """Hands its outputs out one at a time, in order. Made of a collector in use, by `separate`."""

    keeps: bool
    _sealed: bool
    _waiting: deque[Any]

    def put(self, output: Any) -> None:
        """Outputs wait in line; an exception goes past them, and nothing past it."""
        if isinstance(output, Exception):
            self._waiting.clear()
            self.output = output
            self.ready.set()
            return
        if isinstance(self.output, Exception):
            return
        last = self._waiting[-1] if self._waiting else self.output
        if last is None:
            self.output = output
            self.ready.set()
        elif self.keeps or self._sealed:
            self._waiting.append(output)
        else:
            last.add(output, aggregate=self.aggregate)
            return
        self._sealed = self.keeps

    async def get(self) -> Any:
        """The next one; waits for it."""
        output = await super().get()
        self._advance()
        return output

    def get_nowait(self) -> Any:
        """The next one, or None."""
        output = super().get_nowait()
        self._advance()
        return output

    def _advance(self) -> None:
        if self.output is None and self._waiting:
            self.output = self._waiting.popleft()
            self.ready.set()


def separate(collector: Any) -> None:
    """Let `collector`, which a reader may already hold, keep apart what it is told to."""
    if not isinstance(collector, SeparateCollector):
        collector.__class__ = SeparateCollector
        collector.keeps = collector._sealed = False
        collector._waiting = deque()
