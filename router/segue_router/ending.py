"""How an answer ends for its client: complete, or in one clear error.

Owns the last words of one generation, and decides nothing before them. Invariants: what is not complete never
ends in `[DONE]`; an answer that only misses an engine's own count of its tokens is complete, whatever failed.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from segue_router.assemble import response_object
from segue_router.chronicle import Chronicle
from segue_router.client import ClientStream
from segue_router.context import Context
from segue_router.errors import ClientError, UpstreamFailure
from segue_router.exchange import EngineAnswer
from segue_router.request import GenerationRequest
from segue_router.resume import Finish
from segue_router.transcript import Transcript


class Ending:
    """Of one generation. Each method returns the client's response."""

    def __init__(
        self,
        context: Context,
        request: GenerationRequest,
        track: Transcript,
        client: ClientStream,
        chronicle: Chronicle,
    ) -> None:
        self._context = context
        self._request = request
        self._track = track
        self._client = client
        self._chronicle = chronicle

    @property
    def known(self) -> Finish | None:
        """The end of an answer that only misses an engine's own count: no failure is one of the answer."""
        progress = self._track.progress
        if progress.finish_reason is None or not progress.closable:
            return None
        return Finish(progress.finish_reason)

    async def complete(self) -> web.StreamResponse:
        """An engine has said all of it."""
        track = self._track
        # Before the last byte: whoever has the answer may ask for its story.
        self._chronicle.is_at(len(track.prompt_ids or ()), track.delivered_tokens)
        self._chronicle.ends("ok")
        if not self._request.stream:
            body = msgspec.json.encode(response_object(self._request, track))
            return self._client.answer(200, body, {"Content-Type": "application/json"})
        await self._client.write(track.closing())
        return await self._client.end()

    async def finish(self, plan: Finish) -> web.StreamResponse:
        """Everything was there but the end: say it without an engine."""
        self._context.metrics.resume("finish")
        data = self._track.finish(plan.finish_reason)
        if data:
            await self._client.write(data)
        return await self.complete()

    async def refuse(self, reason: str, failure: UpstreamFailure) -> web.StreamResponse:
        """It cannot be continued rightly."""
        if finish := self.known:
            return await self.finish(finish)
        self._context.metrics.refusal(reason)
        self._chronicle.ends("refused", reason)
        message = f"the engine failed and this answer cannot be continued exactly ({reason}): {failure}"
        return await self._client.fail(502, message, kind="server_error", code=f"cannot_resume_{reason}")

    async def give_up(self, status: int, message: str, *, code: str) -> web.StreamResponse:
        """Nobody goes on with it."""
        if finish := self.known:
            return await self.finish(finish)
        self._chronicle.ends("failed", message)
        return await self._client.fail(status, message, kind="server_error", code=code)

    async def stopping(self) -> web.StreamResponse:
        """The router goes."""
        return await self.give_up(503, "the router is shutting down", code="router_stopping")

    async def nobody(
        self, failure: UpstreamFailure, busy: EngineAnswer | None, *, begun: bool
    ) -> web.StreamResponse:
        """There is no engine to go on at. `busy`: what one said that has no room."""
        if self._context.cutting_off:
            return await self.stopping()
        if busy is not None and not self._client.started and not self.known:
            raise busy
        problem = "no other engine could take over in time" if begun else "no engine can be reached"
        return await self.give_up(502 if begun else 503, f"{problem}: {failure}", code="no_engine_available")

    async def no_engine(self) -> web.StreamResponse:
        """There was none to begin on. Raises ClientError (404) for a model that nobody has."""
        registry = self._context.registry
        known = sorted({name for engine in registry.engines for name in engine.model_names()})
        if self._request.model and known and not any(engine.may_serve_more for engine in registry.engines):
            raise ClientError(
                404,
                f"the model {self._request.model!r} is not served here; served: {', '.join(known)}",
                code="model_not_found",
            )
        return await self.give_up(
            503, "no engine that could have it has been reached yet", code="no_engine_available"
        )
