"""Toy engines that do what must never happen after a takeover: proof that a storm's checks can fail.

Of the sequences that an engine takes over one loses a token, the next one says one twice, and the next one
finds another byte in its KV than was computed.
"""

from __future__ import annotations

from itertools import cycle

from segue_shim.toy.__main__ import main
from segue_shim.toy.batch import Request
from segue_shim.toy.engine import ToyEngine


class DefectiveToy(ToyEngine):
    """See the module."""

    defects = cycle(("skips", "repeats", "forgets"))

    def _sample(self, request: Request) -> None:
        defect = next(self.defects) if request.delivered and not request.said_again else ""
        if defect == "forgets":
            page = self.model.tensors["layer1"]
            page[request.blocks[0], 0, 0] ^= 255
        if defect not in ("skips", "repeats"):
            super()._sample(request)
            return
        emit = request.emit

        def say(ids: list[int], finish: str) -> None:
            known = len(request.delivered)
            emit(ids[:known] if defect == "skips" else [*ids, *ids[known:]], finish)

        request.emit = say
        super()._sample(request)
        request.emit = emit


if __name__ == "__main__":
    main(make=DefectiveToy)
