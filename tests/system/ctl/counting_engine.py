"""An engine for the launcher's tests: streams the numbers that follow its prompt, like an OpenAI server.

Its prompt is ten tokens; token n of a sequence is always n, so a resumed answer goes on where it stopped.
Run as a script: `counting_engine.py PORT MODEL`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from aiohttp import web

PROMPT = list(range(10))
STEP_S = 0.01


async def _health(_: web.Request) -> web.Response:
    return web.Response()


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": request.app["model"], "object": "model"}]})


async def _answer(request: web.Request) -> web.StreamResponse:
    body = json.loads(await request.read())
    chat = "messages" in body
    prompt = PROMPT if chat or isinstance(body["prompt"], str) else body["prompt"]
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)

    async def send(choices: list[dict[str, Any]], **more: Any) -> None:
        event = {"id": "x", "created": 1, "model": body["model"], "choices": choices, **more}
        event["object"] = "chat.completion.chunk" if chat else "text_completion"
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    if chat:
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        await send([role], prompt_token_ids=prompt)
    count = body["max_tokens"]
    for number in range(count):
        await asyncio.sleep(STEP_S)  # a step of the engine
        token = len(prompt) + number
        choice: dict[str, Any] = {"index": 0, "token_ids": [token]}
        choice["finish_reason"] = "length" if number == count - 1 else None
        if chat:
            choice["delta"] = {"content": f" {token}"}
        else:
            choice["text"] = f" {token}"
            if number == 0:
                choice["prompt_token_ids"] = prompt
        await send([choice])
    usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
    await send([], usage=usage)
    await response.write(b"data: [DONE]\n\n")
    return response


def main() -> None:
    """Serve until killed."""
    app = web.Application()
    app["model"] = sys.argv[2]
    app.router.add_get("/health", _health)
    app.router.add_get("/v1/models", _models)
    app.router.add_post("/v1/chat/completions", _answer)
    app.router.add_post("/v1/completions", _answer)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
