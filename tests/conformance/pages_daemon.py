"""The daemon's side of the pages suite, run in a child: opens what was exported and copies out of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from segue_core.geometry import Geometry
from segue_daemon.open_pages import open_pages
from segue_daemon.pages import Pages, Piece
from support import real_driver
from support.cuda_double import Control

state: dict[str, Any] = {}
ROOM = 64
"""Bytes past the end of each destination that must stay as they are."""


def open_exported(encoded: bytes, descriptors: list[int] | None = None) -> int:
    """Map it, as the daemon does at registration; bytes of a block."""
    geometry = msgspec.msgpack.decode(encoded, type=Geometry).validate()
    try:
        state["pages"] = open_pages(geometry, descriptors or [])
    finally:
        for fd in descriptors or []:
            os.close(fd)
    return geometry.block_bytes


def pages() -> Pages:
    """What is open."""
    found: Pages = state["pages"]
    return found


def copy_block(block: int, nbytes: int, pinned: bool = False) -> bytes:
    """The bytes of a block, copied to ordinary memory or to the pages' own buffer."""
    room = pages().buffer(nbytes + ROOM) if pinned else np.empty(nbytes + ROOM, np.uint8)
    room[:] = 0xA5
    pages().copy_block(block, room[:nbytes])
    assert (room[nbytes:] == 0xA5).all(), "written past the end"
    return room[:nbytes].tobytes()


def copy_blocks(blocks: list[int], nbytes: int, pinned: bool = False) -> list[list[Any]]:
    """Copy `nbytes` of blocks: [how many are said to be complete, digest of what is new of that] as it
    goes."""
    room = pages().buffer(nbytes + ROOM) if pinned else np.empty(nbytes + ROOM, np.uint8)
    room[:] = 0xA5
    said: list[list[Any]] = []
    for complete in pages().copy_blocks(blocks, room[:nbytes]):
        before = said[-1][0] if said else 0
        size = pages().geometry.block_bytes
        said.append([complete, hashlib.blake2b(room[before * size : complete * size]).hexdigest()])
    assert (room[nbytes:] == 0xA5).all(), "written past the end"
    return said


def copy_pieces(pieces: list[list[int]], nbytes: int, pinned: bool = False) -> list[Any]:
    """Copy pieces, [block, first slot, last slot (0: the whole block), place], into a room of `nbytes`: [how
    many were complete in the end, digest of the room]."""
    room = pages().buffer(nbytes) if pinned else np.empty(nbytes, np.uint8)
    room[:] = 0xA5
    wanted = [Piece(block, room[at:], (first, last) if last else None) for block, first, last, at in pieces]
    complete = 0
    for now in pages().copy_pieces(wanted):
        assert now > complete
        complete = now
    return [complete, hashlib.blake2b(room).hexdigest()]


def refused_blocks(blocks: list[int], nbytes: int) -> list[Any]:
    """[the exception that a copy of blocks raises, whether anything was written]."""
    room = np.full(nbytes, 0xA5, np.uint8)
    try:
        pages().copy_blocks(blocks, room)
    except Exception as error:
        return [type(error).__name__, bool((room != 0xA5).any())]
    return ["none", False]


def copy_slots(block: int, first: int, last: int, room_bytes: int) -> tuple[int, bytes]:
    """(bytes, content) of some slots of a block."""
    room = np.empty(room_bytes, np.uint8)
    nbytes = pages().copy_slots(block, first, last, room)
    return nbytes, room[:nbytes].tobytes()


def copy_piece(block: int, nbytes: int) -> None:
    """A block behind one that is there, into `nbytes`."""
    room = np.empty(pages().geometry.block_bytes, np.uint8)
    for _ in pages().copy_pieces([Piece(0, room), Piece(block, room[:nbytes])]):
        pass


def refusal(function: str, *arguments: int) -> str:
    """The name of the exception that a copy raises."""
    calls = {"copy_block": copy_block, "copy_slots": copy_slots, "copy_piece": copy_piece}
    try:
        calls[function](*arguments)
    except Exception as error:
        return type(error).__name__
    return "none"


def close() -> None:
    """Let the memory go, and wait until it is gone."""
    pages().close()
    pages().close()
    released = getattr(pages(), "released", None)
    assert released is None or released.wait(30)


def keep_buffer(nbytes: int) -> None:
    """A buffer of the pages that somebody goes on using."""
    state["buffer"] = pages().buffer(nbytes)
    state["buffer"][:] = 7


def kept_buffer() -> int:
    """What is in it, added up."""
    return int(state.pop("buffer").sum())


def held() -> list[Any]:
    """[descriptors, mappings of shared memory, what the driver's double counts] of this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = sum("memfd:" in line for line in maps)
    if real_driver.wanted():  # it counts nothing, and which of its own devices it keeps open is its affair
        links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        return [sum(not link.startswith("/dev/nvidia") for link in links), shared]
    return [len(os.listdir("/proc/self/fd")), shared, Control().counts()]
