"""The toy engine: one step after another, each told to the daemon before and after.

This is all that an engine has to do for Segue: `begin` before anything is overwritten, `load` what the daemon
holds of a sequence that comes from elsewhere, compute, `commit`. Nothing here waits for the daemon but
`match`, which has a deadline.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from segue_core.messages.journal import SequenceBegin, SequenceUpdate
from segue_core.messages.local import Matched
from segue_shim.exporter import Exporter
from segue_shim.match_client import MatchClient
from segue_shim.plan import Load, Source, StepPlan, pack_u32, unpack_u64
from segue_shim.toy.batch import Batch, Request, Work
from segue_shim.toy.model import BLOCK_SIZE, KV_BYTES, Model

FINGERPRINT = b"segue-toy-slots!"
FINGERPRINT_OPAQUE = b"segue-toy-opaque"
"""16 bytes: KV may be exchanged between engines that show the same."""
MAX_RUNNING = 256


class ToyEngine:
    """`socket`: the daemon's; empty: unprotected. `chunk`: tokens of a prompt that one step computes."""

    def __init__(
        self, socket: str, name: str, *, num_blocks: int = 1024, chunk: int = 64, opaque: bool = False
    ) -> None:
        self.model = Model(num_blocks, opaque=opaque)
        self.batch = Batch(num_blocks, chunk=chunk, max_running=MAX_RUNNING)
        self.steps = self.computed_tokens = self.loads = self.loaded_tokens = self.failed_loads = 0
        self._exporter: Exporter | None = None
        self._client: MatchClient | None = None
        self._ended: list[str] = []
        if socket:
            self._protect(socket, name, FINGERPRINT_OPAQUE if opaque else FINGERPRINT)

    def _protect(self, socket: str, name: str, fingerprint: bytes) -> None:
        incarnation = secrets.randbits(63)
        self._exporter = Exporter(
            socket,
            engine=name,
            model="toy",
            fingerprint=fingerprint,
            incarnation=incarnation,
            exact=("output", "seed"),
        )
        self._client = MatchClient(
            socket, engine=name, incarnation=incarnation, fingerprint=fingerprint, block_size=BLOCK_SIZE
        )
        self._exporter.register_pages(
            self.model.tensors,
            num_blocks=self.batch.num_blocks,
            block_size=BLOCK_SIZE,
            axes=self.model.axes,
        )

    @property
    def idle(self) -> bool:
        """There is nothing to compute, and nothing to tell."""
        return not len(self.batch) and not self._ended

    def add(self, request: Request) -> None:
        """A new request, or one that comes from elsewhere with what it has produced so far.

        A sequence has one writer: the request with the higher epoch, should it come back here.
        """
        request.output = list(request.delivered)
        for other in (*self.batch.running, *self.batch.waiting):
            if request.seq and other.seq == request.seq:
                older = request if request.epoch <= other.epoch else other
                older.seq = ""
        self.batch.add(request)

    def end(self, request: Request) -> None:
        """It is finished, or nobody waits for it any more."""
        if request.over:
            return
        self.batch.remove(request)
        if request.seq:
            self._ended.append(request.seq)

    def step(self) -> None:
        """One forward pass over all that runs."""
        work, preempted = self.batch.schedule()
        matches: dict[int, Matched] = {}
        for index, each in enumerate(work):
            matched = self._match(each.request)
            if matched is None:
                continue
            work[index] = self.batch.grow(each, matched.tokens + 1)
            if work[index].upto > matched.tokens:
                matches[index] = matched
            else:  # no room for all of it now
                self._release(matched, 0)
        plan = self._plan(work, preempted)
        if self._exporter is not None:
            self._exporter.begin(plan)
        failed: list[int] = []
        for index, each in enumerate(work):
            if index in matches and not self._load(each.request, matches[index]):
                failed += each.request.blocks
                each.request.begun = False  # the next step says it all again, with nothing computed
                continue
            self._compute(each)
        if self._exporter is not None:
            self._exporter.commit(failed)
        self.steps += 1
        for each in work:
            if each.request.computed == len(each.request.ids):
                self._sample(each.request)

    def _plan(self, work: Sequence[Work], preempted: Sequence[Request]) -> StepPlan:
        """The step in the journal's terms."""
        begun, updated, computed, assigned = [], [], [], []
        for each in work:
            request = each.request
            ids = request.ids
            assigned += each.new if request.begun else request.blocks
            if not request.seq:
                request.begun = True
                continue
            if request.begun:
                ids_told, new = pack_u32(ids[request.told :]), pack_u32(each.new)
                updated.append(SequenceUpdate(request.seq, ids_told, new))
            else:
                begun.append(self._begin(request))
                request.begun = True
            request.told = len(ids)
            computed.append((request.seq, each.upto))
        ended, self._ended = tuple(self._ended), []
        return StepPlan(
            assigned=pack_u32(assigned),
            begun=tuple(begun),
            updated=tuple(updated),
            paused=tuple(request.seq for request in preempted if request.seq),
            ended=ended,
            computed=tuple(computed),
            running=len(self.batch),
        )

    def _begin(self, request: Request) -> SequenceBegin:
        """The sequence as a whole, with nothing computed yet."""
        return SequenceBegin(
            seq=request.seq,
            epoch=request.epoch,
            salt=b"",
            token_ids=pack_u32(request.ids),
            block_ids=pack_u32(request.blocks),
            computed=0,
            replication=request.replication,
        )

    def _match(self, request: Request) -> Matched | None:
        """What the daemon holds of a sequence that comes from elsewhere; asked once."""
        if self._client is None or not request.resume or request.asked or request.computed:
            return None
        request.asked = True
        ids = request.ids
        return self._client.match(
            seq=request.seq,
            epoch=request.epoch,
            salt=b"",
            token_ids=pack_u32(ids),
            computed=0,
            limit=len(ids) - 1,  # one token is left to compute, or there is nothing to go on from
        )

    def _load(self, request: Request, matched: Matched) -> bool:
        """Copy a replica into the request's blocks; False: it must be computed."""
        assert self._client is not None and self._exporter is not None
        count = -(-matched.tokens // BLOCK_SIZE)
        extents = tuple(unpack_u64(matched.extents))
        source = Source(self._client.daemon, matched.lease, matched.deadline_ns, extents)
        load = Load(matched.tokens, tuple(request.blocks[:count]), (source,))
        (result,) = self._exporter.load([load])
        self._release(matched, result.loaded)
        if not result.loaded:
            self.failed_loads += 1
            return False
        request.computed = result.loaded
        self.loads += 1
        self.loaded_tokens += result.loaded
        return True

    def _release(self, matched: Matched, loaded: int) -> None:
        assert self._client is not None
        self._client.release(matched.lease, loaded)

    def _compute(self, work: Work) -> None:
        request = work.request
        self.model.compute(request.blocks, request.ids, request.computed, work.upto)
        self.computed_tokens += work.upto - request.computed
        request.computed = work.upto

    def _sample(self, request: Request) -> None:
        """All that is known is computed: there is a next token, unless the answer is long enough."""
        output = request.output
        if len(output) < request.max_tokens:
            output.append(self.model.next_token(request.blocks, request.computed, request.seed, len(output)))
        new = [output[-1]] if request.said_again or not request.delivered else list(output)
        request.said_again = True
        finish = "length" if len(output) >= request.max_tokens else ""
        request.emit(new, finish)
        if finish:
            self.end(request)

    def metrics(self) -> str:
        """Counters in the Prometheus text format."""
        counters = {
            "steps": self.steps,
            "computed_tokens": self.computed_tokens,
            "loads": self.loads,
            "loaded_tokens": self.loaded_tokens,
            "loaded_kv_bytes": self.loaded_tokens * KV_BYTES,
            "failed_loads": self.failed_loads,
            "preemptions": self.batch.preemptions,
        }
        return "".join(
            f"# TYPE segue_toy_{name} counter\nsegue_toy_{name}_total {value}\n"
            for name, value in counters.items()
        )

    def close(self) -> None:
        """Hang up."""
        if self._exporter is not None:
            self._exporter.close()
        if self._client is not None:
            self._client.close()
