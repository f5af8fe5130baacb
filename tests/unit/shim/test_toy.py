"""The toy engine's arithmetic and its batches, without a daemon; what it must answer is worked out apart."""

from __future__ import annotations

import pytest
import torch

from segue_ctl.chaos.reference import continuation
from segue_shim.toy.batch import Request
from segue_shim.toy.engine import ToyEngine
from segue_shim.toy.model import BLOCK_SIZE, UNSEEDED


def asked(prompt: list[int], count: int, seed: int = UNSEEDED, **more: object) -> tuple[Request, list[int]]:
    """A request and what it has said."""
    said: list[int] = []
    return Request(prompt, count, lambda ids, _finish: said.extend(ids), seed=seed, **more), said  # type: ignore[arg-type]


def finish(engine: ToyEngine) -> None:
    """Step until nothing is left to do."""
    for _ in range(2_000):
        if engine.idle:
            return
        engine.step()
    raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("num_blocks", [200, 24])
def test_answers_are_what_the_ids_say(opaque: bool, num_blocks: int) -> None:
    """However prompts are cut into steps, sequences preempted and blocks reused."""
    engine = ToyEngine("", "a", num_blocks=num_blocks, chunk=10, opaque=opaque)
    prompts = [
        [(7 * number + position) % 50_000 for position in range(1 + 9 * number)] for number in range(5)
    ]
    seeds = [UNSEEDED, 3, 4, UNSEEDED, UNSEEDED]
    requests = [asked(prompt, 30, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    for request, _ in requests:
        engine.add(request)
    finish(engine)
    assert [said for _, said in requests] == [
        continuation(prompt, 30, seed) for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert bool(engine.batch.preemptions) == (num_blocks == 24)


def test_an_answer_goes_on_after_what_was_delivered() -> None:
    """It is said again, and the rest follows, draws included."""
    whole = continuation([1, 2, 3], 20, seed=9)
    request, said = asked([1, 2, 3], 20, seed=9, delivered=whole[:11])
    engine = ToyEngine("", "a")
    engine.add(request)
    finish(engine)
    assert said == whole


@pytest.mark.parametrize("position", [0, BLOCK_SIZE - 1, BLOCK_SIZE, 20])
@pytest.mark.parametrize("layer", [0, 3])
def test_one_wrong_byte_of_kv_shows(position: int, layer: int) -> None:
    """Whatever token it belongs to: the answer is another one from then on."""
    request, said = asked(list(range(100, 125)), 10)
    engine = ToyEngine("", "a", chunk=100)
    engine.add(request)
    engine.step()
    page: torch.Tensor = engine.model.tensors[f"layer{layer}"]
    page[request.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE, 17] ^= 1
    finish(engine)
    right = continuation(request.prompt, 10)
    assert said[0] == right[0]
    assert not set(said[1:]) & set(right[1:])


def test_the_newer_writer_keeps_the_name() -> None:
    """A sequence that comes back to an engine which still runs it is replicated under its newer epoch
    only."""
    engine = ToyEngine("", "a")
    old, _ = asked([1], 5, seq="s", epoch=1)
    new, _ = asked([1], 5, seq="s", epoch=2)
    late, _ = asked([1], 5, seq="s", epoch=1)
    for request in (old, new, late):
        engine.add(request)
    assert [old.seq, new.seq, late.seq] == ["", "s", ""]
