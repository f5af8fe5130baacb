"""The crowd: so many clients at once, each asking one thing after the other, all of it by a seed.

Owns the streams and their bookkeeping; whether an answer is right is the tally's word. A client never asks
again for what failed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from segue_core.messages.status import RequestStory
from segue_ctl.chaos.tally import Stream, Tally
from segue_ctl.openai_stream import Answer, StreamFailed, open_stream
from segue_ctl.waiting import get_json


@dataclass(frozen=True)
class Ask:
    """One request. `expected` answers with its tokens and their text, once it is needed."""

    number: int
    body: dict[str, Any]
    expected: Callable[[], tuple[list[int], str]]
    path: str = "/v1/completions"


class Crowd:
    """`streams` clients at the router `url`, until `stop`; every stream that is over goes to `tally`."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        asks: Iterator[Ask],
        tally: Tally,
        *,
        streams: int,
        say: Callable[[str], None],
    ) -> None:
        self.running = 0
        self._session = session
        self._url = url
        self._asks = asks
        self._tally = tally
        self._streams = streams
        self._say = say
        self._stopped = False

    def stop(self) -> None:
        """Nothing new is asked; what runs comes to its end."""
        self._stopped = True

    async def run(self) -> None:
        """Returns once it was stopped and every stream is over."""
        await asyncio.gather(*(self._client() for _ in range(self._streams)))

    async def _client(self) -> None:
        """Asks at least once."""
        while True:
            ask = next(self._asks)
            self.running += 1
            try:
                await self._one(ask)
            finally:
                self.running -= 1
            if self._stopped:
                return

    async def _one(self, ask: Ask) -> None:
        answer, error = Answer(), ""
        try:
            async with open_stream(self._session, f"{self._url}{ask.path}", ask.body) as stream:
                answer.headers, answer.started_ns = stream.headers, stream.started_ns
                async for piece in stream.pieces():
                    answer.add(piece)
        except StreamFailed as failure:
            error = str(failure)
        story = await self._story(answer.headers.get("x-segue-seq", ""))
        tokens, text = ask.expected()
        prompt = ask.body.get("prompt")
        count = len(prompt) if isinstance(prompt, list) else answer.prompt_tokens
        problem = self._tally.add(Stream(ask.number, count, tokens, text, answer, error, story))
        if problem:
            self._say(problem)

    async def _story(self, seq: str) -> RequestStory | None:
        if not seq:
            return None
        code, body = await get_json(self._session, f"{self._url}/v1/segue/requests/{seq}")
        return msgspec.convert(body, RequestStory) if code == 200 else None


def lengths(chance: random.Random) -> tuple[int, int]:
    """(tokens of a prompt, tokens of its answer): mostly short, some longer than several blocks."""
    prompt = chance.choice((chance.randint(1, 20), chance.randint(20, 120), chance.randint(120, 400)))
    return prompt, chance.randint(20, 160)
