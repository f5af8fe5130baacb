"""Where one request starts, as a turn of its conversation: the I/O around `conversations` and `choose`.

Owns what is remembered of the turn before, and remembers this one. The usual case asks nobody: the engine
that wrote the last turn has it in its own prefix cache. Only where that engine is gone, was restarted or has
more to do than others are daemons asked who holds the last turn, all at once and within `probe_ms`, but for
those known to be silent; the engine that is chosen is told to ask its daemon. Invariant: a conversation is
never a reason to wait for an engine, or to go to one that is overloaded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from segue_router.choose import Candidate, at_writer, home_of, rank_for_turn, rank_new, worth_asking
from segue_router.context import Context
from segue_router.conversations import Last, continues, names_of
from segue_router.engine import Engine
from segue_router.holders import ask, candidate
from segue_router.request import GenerationRequest
from segue_router.upstream import now_ms


class Turn:
    """Of one request."""

    def __init__(self, context: Context, request: GenerationRequest, key: str) -> None:
        """`key`: what the request should stay together with (`affinity_key`)."""
        self._context = context
        self._model = request.model
        self._key = key
        self._names = names_of(request, key)
        self._last = context.conversations.find(self._names)
        self._continues = continues(request.body)
        self._engine: tuple[Engine, int] | None = None

    @property
    def known(self) -> bool:
        """Whether the turn before is remembered."""
        return self._last is not None

    async def start(self, usable: Sequence[Engine]) -> Engine | None:
        """The engine that the request starts on; None: there is none."""
        registry, last = self._context.registry, self._last
        candidates = [self._known(candidate(engine)) for engine in usable]
        if last is None:
            ranked = rank_new(candidates, self._key)
            return registry[ranked[0]] if ranked else None
        if writer := at_writer(candidates, self._key):
            return registry[writer]
        asked = [engine for name in worth_asking(candidates) if _is_heard(engine := registry[name])]
        if asked:
            found = await ask(asked, last.seq, self._context.settings.timeouts.probe_ms)
            others = (candidate(engine) for engine in usable if engine not in asked)
            candidates = [self._known(each) for each in (*found, *others)]
        ranked = rank_for_turn(candidates, self._key, tokens=last.tokens, fingerprint=last.fingerprint)
        return registry[ranked[0]] if ranked else None

    def asks(self, engine: Engine) -> bool:
        """Whether `engine` should ask its daemon for KV of this request.

        Not where nothing can be won: its daemon is silent, its own prefix cache has the last turn, or there
        was none and the engine is the one that has what else begins like this. Whom the router knows nothing
        of (it was restarted, or forgot) asks if the request tells of earlier answers.
        """
        if not _is_heard(engine):
            return False
        if self._last is not None:
            return not self._wrote_last(engine)
        if self._continues:
            return True
        if not self._key:
            return False
        having = [each.name for each in self._context.registry.having(self._model)]
        return home_of(having, self._key) != engine.name

    def at(self, engine: Engine) -> None:
        """`engine` answers it now."""
        self._engine = engine, _life(engine)

    def over(self, seq: str, tokens: int) -> None:
        """The answer ended, complete or not, with `tokens` tokens of prompt and answer (0: none is known to
        have come, so nothing is known of where its KV is)."""
        if self._engine is None or not self._names or not tokens:
            return
        engine, life = self._engine
        last = Last(seq, engine.name, life, tokens, sys.intern(engine.fingerprint))
        self._context.conversations.note(self._names[0], last)

    def _known(self, found: Candidate) -> Candidate:
        return replace(found, wrote=self._wrote_last(self._context.registry[found.name]))

    def _wrote_last(self, engine: Engine) -> bool:
        last = self._last
        return last is not None and last.engine == engine.name and last.life == _life(engine)


def _is_heard(engine: Engine) -> bool:
    """Whether its daemon speaks and knows it. One that hangs would cost each turn a time-out, here and in the
    engine."""
    return engine.health.daemon(now_ms()) is not None


def _life(engine: Engine) -> int:
    """Changes when the engine is restarted: as its daemon says, else as its absence was noticed."""
    health = engine.health
    status = health.last_status
    if status is None or not status.incarnation or health.outlived:
        return health.recoveries
    return status.incarnation
