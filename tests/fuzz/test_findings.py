"""What the fuzzer found, each by itself: it stays found."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from typing import Any

import aiohttp
import msgspec
import pytest
import xxhash
import zmq
import zmq.asyncio

from fuzz.daemon_world import DaemonWorld
from fuzz.hostile_servers import RawServer, answered
from fuzz.mutate import Mutator
from fuzz.on_control import LinkTarget, Script
from fuzz.on_journal import GEOMETRY, JournalTarget
from fuzz.on_local import framed, journal
from fuzz.raw_http import exchange, status_of
from fuzz.target import Watchdog, open_files
from segue_core.errors import GeometryError, ProtocolError
from segue_core.framing import decode
from segue_core.geometry import MAX_BLOCKS, Geometry, Region
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.journal import Begin, Commit, SequenceBegin, SequenceUpdate
from segue_core.messages.local import Attach, Register, ToDaemon
from segue_core.messages.peer import (
    MAX_PARTS,
    Ack,
    Bulk,
    BulkHello,
    Delta,
    Hello,
    Nack,
    NackReason,
    Part,
    PartKind,
    Ping,
    bulk_head,
)
from segue_core.messages.status import EngineStatus, SequenceStatus
from segue_core.ring import HEADER_BYTES, SKIP, Word
from segue_core.security import Tokens
from segue_core.service import start_http
from segue_daemon.api import build_api
from segue_daemon.ledger import MAX_SEQUENCE_TOKENS, Ledger
from segue_router.daemons import HttpDaemon
from segue_router.engine_client import MAX_ANSWER_BYTES
from segue_router.errors import EngineFault
from segue_router.events import decode_event, quick_chat, quick_text
from support.waiting import eventually

WIRE = msgspec.msgpack.encode


@pytest.fixture
async def world() -> Any:
    made = DaemonWorld()
    await made.start()
    yield made
    await made.stop()


def talk(world: DaemonWorld, stream: bytes, fds: list[int]) -> bytes:
    """One connection to the unix socket, until the daemon closes it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(str(world.folder / "s"))
        connection.sendmsg([stream], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
        return answer


@pytest.mark.parametrize(
    "stream", [b"\0\0\0\0", framed(WIRE(Attach(PROTOCOL_VERSION, "a", 1)))], ids=["empty", "attach"]
)
async def test_descriptors_that_nobody_asked_for_are_closed(world: DaemonWorld, stream: bytes) -> None:
    """A shim of another release that sends more than it should does not use the daemon's descriptors up."""
    fds = [journal() for _ in range(3)]
    await asyncio.to_thread(talk, world, stream, fds)
    before = open_files()
    for _ in range(10):
        await asyncio.to_thread(talk, world, stream, fds)
    await eventually(lambda: open_files() <= before, "they are closed", timeout_s=30)
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(
            1, 1, (1 << 20,), (Region(0, 0, (1, 1 << 15, 1 << 15), (2, 2, 2), 1, ("block", "dim", "head")),)
        ),
        Geometry(4, 1, (1 << 20,), (Region(0, 0, (4, 1 << 15), (1, 2), 1, ("block", "dim")),) * 4),
        Geometry(MAX_BLOCKS + 1, 1, (1 << 40,), (Region(0, 0, (MAX_BLOCKS + 1,), (64,), 8, ("block",)),)),
    ],
    ids=["strides overlap", "many regions", "blocks"],
)
def test_a_geometry_that_would_take_for_ever_is_refused_at_once(geometry: Geometry) -> None:
    """Listing a billion pieces of a block would stop the daemon, and end its memory."""
    with pytest.raises(GeometryError):
        geometry.validate()


async def journal_world() -> JournalTarget:
    target = JournalTarget(Mutator("findings"))
    await target.start()
    return target


async def test_a_head_at_the_end_of_all_numbers_is_survived() -> None:
    """Bytes written over the journal's header cost protection for a moment, not the daemon's task."""
    target = await journal_world()
    target.writer.set(Word.HEAD, (1 << 64) - 1)
    target.session.drain()
    at = HEADER_BYTES + target.writer.get(Word.TAIL) % target.writer.capacity
    os.pwrite(target.ring_fd, SKIP.to_bytes(4, "little"), at)
    target.session.drain()
    assert target.session.broken_records == 2
    await target.stop()


@pytest.mark.parametrize("word", [Word.HEAD, Word.TAIL, Word.DROPPED])
@pytest.mark.parametrize("value", [1 << 40, (1 << 64) - 1])
async def test_one_stray_write_to_the_header_does_not_end_protection(word: Word, value: int) -> None:
    """The engine and its daemon agree again, without anybody being restarted."""
    target = await journal_world()
    target.writer.append(WIRE(Commit(1, ())))
    target.session.drain()
    target.writer.set(word, value)
    for step in range(4):
        target.clock.advance_ms(200)
        begun = SequenceBegin("s", 1, b"", bytes(8), bytes(4), 0)
        target.writer.append(WIRE(Begin(step, True, b"", (begun,), (), (), ())))
        target.session.drain()
    assert "s" in target.session.ledger.sequences
    await target.stop()


def test_a_sequence_that_never_ends_growing_is_not_followed() -> None:
    """A broken engine does not fill the daemon's memory with ids."""
    ledger = Ledger(GEOMETRY, b"f" * 16, max_sequences=2)
    ledger.apply(Begin(1, False, b"", (SequenceBegin("s", 1, b"", b"", b"", 0),), (), (), ()))
    update = SequenceUpdate("s", bytes(4 * (MAX_SEQUENCE_TOKENS // 2)), b"")
    ledger.apply(Begin(1, False, b"", (), (update,), (), ()))
    with pytest.raises(ProtocolError):
        for _ in range(2):
            ledger.apply(Begin(1, False, b"", (), (update,), (), ()))
    assert ledger.sequences["s"].known <= MAX_SEQUENCE_TOKENS


@pytest.mark.parametrize("epoch", [1 << 63, -1])
def test_epochs_that_cannot_be_said_are_refused(epoch: int) -> None:
    """An epoch at the end of all numbers has no next one, and could not be told to the engine."""
    ledger = Ledger(GEOMETRY, b"f" * 16, max_sequences=2)
    with pytest.raises(ProtocolError):
        ledger.apply(Begin(1, False, b"", (SequenceBegin("s", epoch, b"", b"", b"", 0),), (), (), ()))
    with pytest.raises(ProtocolError):
        decode(WIRE(Nack(1, "s", epoch, 0, NackReason.FENCED, 0)), Nack, peer="b")


def test_a_delta_of_a_million_parts_is_refused_before_it_is_read() -> None:
    """Each part takes the receiver's time: nobody else would be served meanwhile."""
    parts = (Part(0, PartKind.KEY, b"k" * 16, 0),) * (MAX_PARTS + 1)
    delta = Delta(1, "s", 1, 1, b"f" * 16, b"", 1, 64, 0, bytes(4), parts, 0)
    with pytest.raises(ProtocolError):
        decode(WIRE(delta), Bulk, peer="a")


async def test_a_bit_that_changes_in_a_bulk_header_changes_no_replica(world: DaemonWorld) -> None:
    """Right bytes under another name, epoch or position would be wrong bytes: that link is ended."""
    listener = socket.create_server(("127.0.0.1", 0))
    for bit in range(8 * len(framed_delta())):
        await world.receiver._greet(b"id", Hello(PROTOCOL_VERSION, "a", 7))
        hello = WIRE(BulkHello(7, world.receiver._writers[b"id"].ticket))
        frame = bytearray(framed_delta())
        frame[bit // 8] ^= 1 << bit % 8
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        theirs.setblocking(False)
        ours.sendall(bulk_head(hello, 0) + hello + frame + bytes(64))
        ours.close()
        await asyncio.wait([asyncio.create_task(world.receiver._serve_bulk(theirs, "peer"))])
        assert not world.store.replicas, f"bit {bit}"
    listener.close()


def framed_delta() -> bytes:
    """A frame less its payload of 64 zeros, as its writer sends it."""
    part = Part(0, PartKind.WHOLE, b"", 64)
    checksum = xxhash.xxh3_64_intdigest(bytes(64))
    header = WIRE(Delta(1, "s", 1, 7, b"f" * 16, b"", 4, 64, 0, bytes(4), (part,), checksum))
    return bulk_head(header, 64) + header


def test_what_an_engine_says_of_itself_is_bounded() -> None:
    """It is repeated to the router five times a second."""
    register = Register(PROTOCOL_VERSION, "a", 1, "m", b"f" * 16, GEOMETRY, exact_detail="x" * (1 << 20))
    with pytest.raises(ProtocolError):
        decode(WIRE(register), ToDaemon, peer="engine")


async def turns_while(work: asyncio.Task[Any]) -> int:
    """How often others got to run until `work` was done."""
    turns = 0
    while not work.done():
        await asyncio.sleep(0)
        turns += 1
    return turns


async def test_a_flood_of_answers_lets_others_run() -> None:
    """A peer that answers without end, or much in one message, does not stop the daemon's heart."""
    target = LinkTarget(Mutator("findings"))
    await target.start()
    target.link._clock = Restless()
    script: Any = Script([WIRE(Ack(1, "s", 1, 0, 0))] * 3_000)
    listening = asyncio.create_task(target.link._listen(script))
    assert await turns_while(listening) > 2_000
    assert isinstance(listening.exception(), EOFError)
    await target.stop()


class Restless:
    """A clock on which each look is a second later: every slice is used up."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        self._now_ns += 1_000_000_000
        return self._now_ns


async def test_a_flood_of_questions_lets_others_run(world: DaemonWorld) -> None:
    """Messages that are there already never make their reader wait: it lets others run all the same."""

    class Full:
        """A control socket that is never empty."""

        def __init__(self) -> None:
            self.left = 3_000

        async def recv_multipart(self, **_: object) -> list[Any]:
            self.left -= 1
            if not self.left:
                raise EOFError
            return [zmq.Frame(b"id"), zmq.Frame(WIRE(Ping(1)))]

        async def send_multipart(self, *_: object, **__: object) -> None:
            return

    receiver = world.receiver
    control, receiver._control = receiver._control, Full()  # type: ignore[assignment]
    clock, receiver._clock = receiver._clock, Restless()
    serving = asyncio.create_task(receiver._serve_control())
    assert await turns_while(serving) > 1_000
    receiver._control, receiver._clock = control, clock
    assert isinstance(serving.exception(), EOFError)


async def test_names_that_come_back_again_and_again_are_not_kept_for_ever(world: DaemonWorld) -> None:
    """A peer that greets under ever new names, in ever new lives, costs bounded memory."""
    for number in range(1_200):
        for life in (1, 2):
            await world.receiver._greet(b"id", Hello(PROTOCOL_VERSION, f"n{number}", life))
            world.receiver._forget(world.receiver._writers[b"id"])
    assert len(world.receiver._reborn) <= 1_024


@pytest.mark.parametrize("code", ["²", "9" * 5_000, "-1", 10**30])
def test_an_error_code_that_is_no_number_is_an_error_all_the_same(code: Any) -> None:
    """An engine's odd error fails over like any other."""
    with pytest.raises(EngineFault):
        decode_event(msgspec.json.encode({"error": {"message": "no", "code": code}}))


def test_bytes_that_are_no_text_are_not_passed_on() -> None:
    """Every client gets JSON, also in fields that the router does not look at."""
    chat = b'{"id":"\xff","choices":[{"delta":{"content":"a"},"token_ids":[1]}]}'
    text = b'{"id":"\xff","choices":[{"text":"a","token_ids":[1]}]}'
    assert quick_chat(chat) is None and quick_chat(chat.replace(b"\xff", b"x")) is not None
    assert quick_text(text) is None and quick_text(text.replace(b"\xff", b"x")) is not None


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (
            SequenceStatus,
            {"seq": "s", "role": "replica", "epoch": 1, "computed": 1, "known": 1, "watermark": 1},
        ),
        (EngineStatus, {"engine": "e", "state": "running"}),
    ],
)
def test_a_daemons_word_beyond_all_numbers_is_not_taken(kind: Any, body: dict[str, Any]) -> None:
    """A request is not lost over arithmetic on what a daemon said."""
    field = "bytes" if kind is SequenceStatus else "progress_age_ms"
    msgspec.json.decode(msgspec.json.encode(body | {field: 5}), type=kind)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(body | {field: 10**400 // 10**80}), type=kind)


async def test_a_request_that_is_none_fills_no_log(world: DaemonWorld) -> None:
    """Bad requests, bodies that do not unpack and clients that leave cause no traceback."""
    runner, port = await start_http(build_api(world.daemon, Tokens(())), "127.0.0.1", 0, what="http")
    head = b"POST /v1/sequences/s/fence HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 5\r\n"
    with Watchdog() as watchdog:
        assert status_of(await exchange(port, head + b"Content-Encoding: gzip\r\n\r\nhello")) == 400
        assert status_of(await exchange(port, b"POST /\xff HTTP/1.1\r\nHost: x\r\n\r\n")) == 400
        await exchange(port, head + b"\r\nhe")
    watchdog.check()
    await runner.cleanup()


async def test_a_daemon_that_says_too_much_is_not_heard_out() -> None:
    """Its answer costs the router bounded memory, and counts as none."""
    status = {
        "seq": "s",
        "role": "replica",
        "epoch": 1,
        "computed": 1,
        "known": 1,
        "watermark": 1,
        "bytes": 1,
    }
    body = msgspec.json.encode(status)
    padding = b""
    server = RawServer(lambda _, __: answered(padding + body))
    await server.start()
    async with aiohttp.ClientSession() as session:
        daemon = HttpDaemon(session, f"http://127.0.0.1:{server.port}")
        assert await daemon.sequence("s", 30_000) is not None
        padding = b" " * MAX_ANSWER_BYTES
        assert await daemon.sequence("s", 30_000) is None
    await server.stop()
