"""What the router tells the engine's shim inside a request: `kv_transfer_params["segue"]`."""

from __future__ import annotations

import msgspec

MAX_SEQ_CHARS = 128
PARAMS_KEY = "segue"


class SegueParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """`seq` names the generation, `epoch` its writer; `resume` says that a replica may be near."""

    seq: str
    epoch: int
    resume: bool = False


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
    return params
