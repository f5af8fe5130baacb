"""The least that a proxy can do with aiohttp and uvloop: pass bytes on as they come.

`python -m segue_ctl.bench_router_proxy PORT UPSTREAM`. What `bench router` compares segue-router with.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import aiohttp
import uvloop
from aiohttp import web

from segue_core.service import start_http, until_signalled
from segue_ctl.free_ports import LOOPBACK

_SESSION: web.AppKey[aiohttp.ClientSession] = web.AppKey("session", aiohttp.ClientSession)
_UPSTREAM: web.AppKey[str] = web.AppKey("upstream", str)


async def _pass(request: web.Request) -> web.StreamResponse:
    app = request.app
    url = app[_UPSTREAM] + request.path
    async with app[_SESSION].request(request.method, url, data=await request.read()) as answer:
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
        await response.prepare(request)
        async for data in answer.content.iter_any():
            await response.write(data)
        await response.write_eof()
        return response


async def _session(app: web.Application) -> AsyncIterator[None]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as app[_SESSION]:
        yield


async def _serve(port: int, upstream: str) -> None:
    app = web.Application()
    app[_UPSTREAM] = upstream
    app.cleanup_ctx.append(_session)
    app.router.add_route("*", "/{path:.*}", _pass)
    runner, _ = await start_http(app, LOOPBACK, port, what="port", shutdown_timeout=0.1)
    await until_signalled()
    await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), sys.argv[2]))
