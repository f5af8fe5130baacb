"""The engine's side of the sidecar, for any torch engine: register pages, say what each step does, load.

    exporter = Exporter(socket_path, engine="a", model="m", fingerprint=..., incarnation=...)
    exporter.register_pages(kv_tensors, num_blocks=..., block_size=...)
    each step: exporter.begin(plan); [exporter.load(...)]; run the model; exporter.commit()

`begin` comes before anything is overwritten, `commit` when the step's KV is complete. All calls come from
the engine's one thread, cost microseconds, wait for nobody and raise nothing: what goes wrong here
is logged once, and the engine runs on, unprotected.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec
import torch

from segue_core.clock import Clock, MonotonicClock
from segue_core.errors import GeometryError
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.journal import Begin
from segue_core.messages.local import MAX_DETAIL_CHARS, Notice, Register, TierMapped
from segue_core.messages.status import Exact
from segue_core.ring import Word
from segue_shim.channel import Channel
from segue_shim.cuda_driver import CudaCallError
from segue_shim.cuda_loader import CudaLoader
from segue_shim.cuda_side import CudaSide
from segue_shim.cuda_tensors import cuda_side, on_gpu
from segue_shim.cuda_tier import TierError
from segue_shim.guard import contained, nothing
from segue_shim.layout import Pages, share_pages
from segue_shim.loader import Loader
from segue_shim.options import ExporterOptions
from segue_shim.plan import Load, LoadResult, StepPlan
from segue_shim.regions import Axes
from segue_shim.registrar import Listener, Registrar
from segue_shim.table import LiveTable

logger = logging.getLogger("segue_shim")

IDLE = StepPlan()
LET_GO_S = 3.0
"""How long a daemon that lets go of memory is waited for: it takes milliseconds unless its GPU is stuck."""
ANNOUNCE_SHARE = 4
"""Announcements take at most this part of the free ring, so that the record that holds them fits even
where the ring's end splits the free room, and the step's own news find room beside them."""


class Exporter:
    """One engine rank's tie to its daemon. Writes each step to the journal; loads from the arena."""

    notice: ClassVar[Notice] = "before"

    def __init__(
        self,
        socket_path: str,
        *,
        engine: str,
        model: str,
        fingerprint: bytes,
        incarnation: int,
        defaults: Mapping[str, float] | None = None,
        exact: tuple[Exact, ...] = (),
        exact_detail: str = "",
        rank: int = 0,
        ranks: int = 1,
        options: ExporterOptions | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`defaults`, `exact` and `exact_detail`: see `EngineStatus`; `rank` of `ranks`: see `Register`."""
        self.broken = False
        self._path = socket_path
        self._engine = engine
        self._model = model
        self._fingerprint = fingerprint
        self._incarnation = incarnation
        self._defaults = dict(defaults or {})
        self._exact = exact
        self._exact_detail = exact_detail[:MAX_DETAIL_CHARS]
        self._rank = rank
        self._ranks = ranks
        self._options = options or ExporterOptions()
        self._clock = clock or MonotonicClock()
        self._table = LiveTable()
        self._encoder = msgspec.msgpack.Encoder()
        self._registrar: Registrar | None = None
        self._loader: Loader | CudaLoader | None = None
        self._gpu: CudaSide | None = None
        self._channel: Channel | None = None
        # Handed over by the registrar's thread: the newest registration (None: lost), and fenced sequences.
        self._offers: deque[Channel | None] = deque()
        self._fenced: deque[tuple[str, int]] = deque(maxlen=4096)
        self._plan = IDLE
        self._step = 0
        self._in_step = False

    @property
    def registered(self) -> bool:
        """Whether the engine's steps reach a daemon right now."""
        offer = self._offers[-1] if self._offers else self._channel
        return offer is not None and not self.broken

    @contained(lambda: False)
    def register_pages(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        num_blocks: int,
        block_size: int,
        axes: Axes = None,
    ) -> bool:
        """Share the engine's KV memory and start registering it. False: not understood, unprotected."""
        try:
            if on_gpu(tensors):
                gpu = cuda_side(tensors, num_blocks=num_blocks, block_size=block_size, axes=axes)
                return self.register_gpu(gpu)
            pages = share_pages(tensors, num_blocks=num_blocks, block_size=block_size, axes=axes)
        except GeometryError as error:
            self.refuse(str(error))
            return False
        self._start(pages)
        return True

    @contained(lambda: False)
    def register_gpu(self, gpu: CudaSide) -> bool:
        """Start registering KV memory on a GPU: for an engine that knows its addresses, and has no
        tensors."""
        self._gpu = gpu
        self._start(Pages(gpu.geometry, ()))
        return True

    def refuse(self, reason: str) -> None:
        """This engine cannot be protected: say why, once."""
        logger.warning("segue: the engine runs unprotected: %s", reason)

    def _start(self, pages: Pages) -> None:
        self._loader = Loader(pages) if self._gpu is None else self._gpu.loader
        message = Register(
            version=PROTOCOL_VERSION,
            engine=self._engine,
            incarnation=self._incarnation,
            model=self._model,
            fingerprint=self._fingerprint,
            geometry=pages.geometry,
            defaults=self._defaults,
            exact=self._exact,
            exact_detail=self._exact_detail,
            rank=self._rank,
            ranks=self._ranks,
            notice=self.notice,
            timeline=self._gpu is not None,
            tier=self._gpu is not None,
        )
        listener = Listener(
            up=self._offer,
            down=lambda: self._offers.append(None),
            fenced=lambda seq, epoch: self._fenced.append((seq, epoch)),
        )
        self._registrar = Registrar(self._path, message, pages.fds, listener, self._options, self._gpu)
        self._registrar.start()

    def _offer(self, channel: Channel) -> None:
        """From the registrar's thread. What an idle engine has not taken over by now, it never needs."""
        while self._offers:
            try:
                unused = self._offers.popleft()
            except IndexError:
                break
            if unused is not None:
                unused.close()
        self._offers.append(channel)

    # -- each step ----------------------------------------------------------------------------

    @contained(nothing)
    def begin(self, plan: StepPlan) -> None:
        """A step is about to run as `plan` says: call before anything is overwritten."""
        if self._gpu is not None and self._gpu.moved:
            logger.warning("segue: the KV cache's memory was exchanged; sharing it anew")
            self.suspend()
            self.resume()
        self._adopt()
        self._plan = plan
        self._step += 1
        self._in_step = True
        channel = self._channel
        if channel is None:
            self._table.begin(plan, self._step, 0)
            return
        ring = channel.ring
        if ring.get(Word.SNAPSHOT_WANTED):
            ring.set(Word.SNAPSHOT_WANTED, 0)
            self._table.announce_all()
        self._append(channel, self._table.begin(plan, self._step, ring.free() // ANNOUNCE_SHARE))
        ring.set(Word.RUNNING, plan.running)
        ring.set(Word.STEP_CHANGED_NS, self._clock.now_ns())
        ring.set(Word.STEP_BEGUN, self._step)

    @contained(nothing)
    def commit(self, failed_blocks: Sequence[int] = (), unsure_blocks: Sequence[int] = ()) -> None:
        """The step is complete. Sequences with `failed_blocks` did not get on: see `LoadResult`; of those
        with `unsure_blocks` the next step tells (another rank may have failed to load them)."""
        if not self._in_step:
            return
        self._in_step = False
        record = self._table.commit(self._plan, self._step, failed_blocks, unsure_blocks)
        if self._gpu is not None and self._registrar is not None and not self._marked(self._gpu):
            return
        channel = self._channel
        if channel is None:
            return
        self._append(channel, record)
        channel.ring.set(Word.STEP_CHANGED_NS, self._clock.now_ns())
        channel.ring.set(Word.STEP_COMMITTED, self._step)

    def _marked(self, gpu: CudaSide) -> bool:
        try:
            gpu.mark(self._step)
        except CudaCallError as error:
            self.give_up(f"its GPU cannot say which steps are complete: {error}")
            return False
        return True

    def _append(self, channel: Channel, record: msgspec.Struct | None) -> None:
        if record is not None and not channel.append(self._encoder.encode(record)):
            # Counted in the ring's header. What the daemon missed it hears anew, when there is room.
            self._table.announce_all()

    def _adopt(self) -> None:
        """Take over what the registrar's thread has brought since the last step."""
        while self._offers:
            try:
                offer = self._offers.popleft()
            except IndexError:  # the registrar's thread has just taken it back
                break
            if self._channel is not None:
                self._channel.close()
            self._channel = offer
            self._table.announce_all()
        while self._fenced:
            seq, epoch = self._fenced.popleft()
            self._table.fence(seq, epoch)

    # -- loading ------------------------------------------------------------------------------

    def load(self, loads: Sequence[Load]) -> list[LoadResult]:
        """Copy replicas into the engine's pages, after `begin` and before the model runs.

        A load whose lease ran out, or whose arena is gone, has failed: its blocks must be computed.
        """
        return [self._load(load) or self._failed(load) for load in loads]

    @contained(nothing)
    def _load(self, load: Load) -> LoadResult | None:
        arena = self._channel.arena if self._channel is not None else None
        source = load.sources[self._rank]
        if arena is None or self._loader is None or arena.incarnation != source.daemon:
            logger.warning("segue: a replica of %d tokens is out of reach, computing instead", load.tokens)
            return None
        try:
            self._loader.copy(arena, load.block_ids, source.extents)
        except ValueError as error:
            logger.warning(
                "segue: a replica of %d tokens does not fit, computing instead: %s", load.tokens, error
            )
            return None
        except TierError as error:
            problem = str(error)
            logger.warning("segue: a replica of %d tokens: %s; computing instead", load.tokens, problem)
            if self._registrar is not None:
                self._registrar.tell(TierMapped(error.number, problem))
            return None
        except CudaCallError as error:
            self.give_up(f"a replica cannot be copied to its GPU: {error}")
            return None
        if self._clock.now_ns() >= source.deadline_ns:
            logger.warning(
                "segue: the lease on a replica of %d tokens ran out, computing instead", load.tokens
            )
            return None
        return LoadResult(source.daemon, source.lease, load.tokens, ())

    def _failed(self, load: Load) -> LoadResult:
        source = load.sources[self._rank]
        return LoadResult(source.daemon, source.lease, 0, load.block_ids)

    # -- memory that goes and comes back ---------------------------------------------------------

    def suspend(self) -> None:
        """The KV memory is about to go, for an engine that sleeps: have the daemon let go of it, and hold
        nothing of it. Waits at most `LET_GO_S`; whatever the memory held is forgotten. Raises nothing."""
        if self._gpu is None:
            return
        registrar, self._registrar = self._registrar, None
        if registrar is not None and not registrar.leave(LET_GO_S):
            logger.warning("segue: the daemon has not let go of the KV cache yet, which goes now")
        self._adopt()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._table = LiveTable()
        self._gpu.withdraw()

    @contained(nothing)
    def resume(self) -> None:
        """The KV memory is back, under the same addresses: export it anew, and register again."""
        if self._gpu is None or self._registrar is not None:
            return
        try:
            self._gpu.share()
        except GeometryError as error:
            self.refuse(str(error))
            return
        self._start(Pages(self._gpu.geometry, ()))

    # -- the end ------------------------------------------------------------------------------

    def give_up(self, reason: str) -> None:
        """What the engine says is not reliable any more: protect nothing from here on."""
        if not self.broken:
            self.broken = True
            self.refuse(reason)
            self.on_broken()

    def on_broken(self) -> None:
        """Look idle and empty to the daemon, but stay connected: hanging up would look like death."""
        channel = self._channel
        if channel is not None:
            channel.append(self._encoder.encode(Begin(self._step, True, b"", (), (), (), ())))
            channel.ring.set(Word.RUNNING, 0)

    def close(self) -> None:
        """The engine shuts down: hang up, broken or not. Raises nothing."""
        try:
            if self._registrar is not None:
                self._registrar.close()
                self._registrar = None
            self._adopt()
            if self._channel is not None:
                self._channel.close()
                self._channel = None
            if self._gpu is not None:  # its descriptors would keep the memory as long as this process lives
                self._gpu.withdraw()
        except Exception:  # an exception that leaves an engine's hook ends the engine
            logger.exception("segue: could not let go cleanly")
