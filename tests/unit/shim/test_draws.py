"""Random numbers of seeded requests: skipped and taken back, with nothing but torch."""

from __future__ import annotations

import pytest
import torch

from segue_shim.draws import RewindableGenerator, skip_exponentials, skip_integers


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(generator: torch.Generator) -> int:
    """As vLLM's sampler does on a CPU."""
    return int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long).item())


@pytest.mark.parametrize("tokens", [0, 1, 5, 623, 624, 625, 2000])
def test_skipping_is_drawing(tokens: int) -> None:
    """The next number is the one that follows so many others, across the generator's inner buffer too."""
    stepped, skipped = seeded(), seeded()
    for _ in range(tokens):
        draw(stepped)
    skip_integers(skipped, tokens, 1000)
    assert torch.equal(stepped.get_state(), skipped.get_state())
    assert draw(stepped) == draw(skipped)


def test_noise_is_skipped_by_drawing_it() -> None:
    """One vector of the vocabulary's size a token."""
    stepped, skipped = seeded(), seeded()
    for _ in range(3):
        torch.empty(50).exponential_(generator=stepped)
    skip_exponentials(skipped, 3, 50)
    assert torch.equal(stepped.get_state(), skipped.get_state())


def test_the_ways_of_drawing_can_be_told_apart() -> None:
    """Else the self-test could not choose: an integer leaves another state than noise."""
    integers, noise = seeded(), seeded()
    skip_integers(integers, 2, 50)
    skip_exponentials(noise, 2, 50)
    assert not torch.equal(integers.get_state(), noise.get_state())


def test_draws_in_vain_are_taken_back() -> None:
    """The way vLLM does it, by moving the offset back once a step; and again after each step in vain."""
    plain, guarded = seeded(), RewindableGenerator.of(seeded())
    for _ in range(3):
        draw(guarded)
        guarded.set_offset(guarded.get_offset() - 4)
    assert draw(guarded) == draw(plain)


def test_a_request_that_comes_back_is_marked_where_it_stands() -> None:
    """Draws that counted are not taken back with later ones."""
    plain, guarded = seeded(), RewindableGenerator.of(seeded())
    assert [draw(plain), draw(plain)] == [draw(guarded), draw(guarded)]
    assert RewindableGenerator.of(guarded) is guarded
    draw(guarded)
    guarded.rewind()
    assert draw(guarded) == draw(plain)
