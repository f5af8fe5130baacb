"""What the probes of `seguectl doctor` say: one JSON line each on their standard output.

A probe runs in a process of its own, for what it tries may hang or crash: before each step it says `Doing`,
in the end once what it found. Each probe belongs to the package whose code it tries, and ends with status 0
whatever it finds. Fields are only ever added.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import msgspec

MAX_FOUND = 1024
"""GPUs, or peers, in one answer."""

WAITING = "waiting for the other process"
"""A step in which a probe that did not end is not to blame."""

ShareKind = Literal["cuda_ipc", "cuda_vmm"]
"""See `memory_handle.HandleKind`."""


class Doing(msgspec.Struct, frozen=True, tag="doing"):
    """The step that begins now; the last one of a probe that did not end is the one that it hangs in."""

    step: str


class Gpu(msgspec.Struct, frozen=True):
    """A GPU, or an instance of one (MIG). `compute_mode` is CUcomputemode: 0 shared, 2 prohibited, 3 for one
    process. `write_value_64`, `ipc`, `vmm_fd`: what its driver says that it can do."""

    uuid: str
    name: str
    total_bytes: int = 0
    compute_mode: int = 0
    mig: bool = False
    mps: bool = False
    write_value_64: bool = True
    ipc: bool = True
    vmm_fd: bool = True


class GpusFound(msgspec.Struct, frozen=True, tag="gpus"):
    """What a process sees of the driver. `library`: whether there is one; `version`: as CUDA counts, such as
    12080; `error`: the call and the driver's name for what went wrong, if something did."""

    library: bool
    version: int = 0
    gpus: Annotated[tuple[Gpu, ...], msgspec.Meta(max_length=MAX_FOUND)] = ()
    error: str = ""


class ShareFound(msgspec.Struct, frozen=True, tag="share"):
    """Whether one process read what another one wrote on the same GPU. `equal`: every byte was right, of
    `nbytes`. `step_seen`: the number that the GPU wrote behind the other process's work arrived.
    `pinned_bytes` were page-locked in `pinned_ms`. `error`: why the rest is missing; `hint`: what to do."""

    equal: bool = False
    nbytes: int = 0
    open_ms: float = 0.0
    step_seen: bool = False
    pinned_bytes: int = 0
    pinned_ms: float = 0.0
    pinned_error: str = ""
    error: str = ""
    hint: str = ""


class PeerFound(msgspec.Struct, frozen=True):
    """One peer daemon. `control_ms`: a question and its answer on a connection that stands; `bulk`: whether
    the connection for replicas was taken. `error` and `hint` as above."""

    name: str
    address: str
    leader: bool = False
    control_ms: float | None = None
    bulk: bool = False
    encrypted: bool = False
    error: str = ""
    hint: str = ""


PEERS_AT_ONCE = 16
"""Asked at the same time, of those that a daemon has."""
STEPS_A_PEER = 4
"""Connecting, greeting, a round trip and bulk, each within `timeouts.peer_ms`."""


class PeersFound(msgspec.Struct, frozen=True, tag="peers"):
    """All peers of one daemon. `certificate_days`: how long its own certificate is valid; None: it has
    none."""

    peers: Annotated[tuple[PeerFound, ...], msgspec.Meta(max_length=MAX_FOUND)] = ()
    certificate_days: int | None = None
    error: str = ""
    hint: str = ""


Line = Doing | GpusFound | ShareFound | PeersFound
"""Whatever a probe may say."""


def say(line: Line) -> None:
    """Write one line to standard output, at once."""
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()
