"""What the router tells the engine's shim inside a request: `kv_transfer_params["segue"]`."""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_SEQ_CHARS = 128
PARAMS_KEY = "segue"
Replication = Literal["off", "low", "normal", "high"]
"""Whether a sequence's KV is copied to peers, and its share of the way there beside others."""


class Delivered(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one choice of the answer has produced already: token ids in order.

    `finish_reason` (the engine's own word: stop, length): the choice is over, and is only said again.
    """

    ids: list[int] = []
    finish_reason: str = ""
    stop_reason: int | str | None = None


class SegueParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """`seq` names the generation, `epoch` its writer; `resume` says that a replica may be near.

    `delivered`, one entry a choice in the order of their indexes: the engine takes these ids as its own
    output and goes on after them, and its stream begins with all of them again. Empty: it starts from the
    beginning. `one_by_one`: its parsers are fed with them token by token, as they were the first time.
    `replication`: as the client wants it; off: its KV stays here.
    """

    seq: str
    epoch: int
    resume: bool = False
    delivered: list[Delivered] = []
    one_by_one: bool = False
    replication: Replication = "normal"


def choice_seq(seq: str, choice: int) -> str:
    """The name under which choice `choice` of a generation with several is replicated."""
    return seq if choice == 0 else f"{seq}.{choice}"


def parse_params(kv_transfer_params: object) -> SegueParams | None:
    """The Segue part of a request's `kv_transfer_params`, or None if there is none or it is malformed."""
    if not isinstance(kv_transfer_params, dict) or PARAMS_KEY not in kv_transfer_params:
        return None
    try:
        params = msgspec.convert(kv_transfer_params[PARAMS_KEY], SegueParams)
    except msgspec.ValidationError:
        return None
    if not 0 < len(params.seq) <= MAX_SEQ_CHARS or not 0 < params.epoch < 1 << 63:
        return None
    if any(not 0 <= token < 1 << 31 for choice in params.delivered for token in choice.ids):
        return None
    return params
