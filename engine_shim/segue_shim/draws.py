"""A seeded request's random numbers: skipping those that were drawn elsewhere, taking back those in vain.

vLLM gives every seeded request a `torch.Generator` and draws once a token. How it draws depends on the
device and on its options; `WAYS` are the known ones, and `vllm_selftest` finds out which is right here.
Torch only, nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Draw = Callable[[torch.Generator, int, int], None]
"""(generator, tokens, vocabulary): leave the generator as if so many tokens had been drawn."""

_ANY_OFFSET = 1 << 20


class RewindableGenerator(torch.Generator):
    """A CPU generator that can go back to its mark; `set_offset`, which CPU generators lack, does just that.

    vLLM (0.32) moves the offset of a seeded request's generator back when a step drew for it in vain, because
    its prompt was not complete. On a CPU that is a RuntimeError, and the end of the engine. Until a prompt is
    complete all draws are in vain: the mark is set when the request enters the batch, and going back to it
    undoes exactly them.
    """

    _marked: torch.Tensor

    @classmethod
    def of(cls, generator: torch.Generator) -> RewindableGenerator:
        """`generator` itself if it is one, else one that goes on where it stands; marked there."""
        made = generator if isinstance(generator, cls) else cls()
        if made is not generator:
            made.set_state(generator.get_state())
        made.mark()
        return made

    def mark(self) -> None:
        """From here on `rewind` leads back here."""
        self._marked = self.get_state()

    def rewind(self) -> None:
        """Take back every draw since the mark."""
        self.set_state(self._marked)

    def get_offset(self) -> int:
        """A number to compute with; what comes back through `set_offset` is not looked at."""
        return _ANY_OFFSET

    def set_offset(self, offset: int) -> None:
        """Take back every draw since the mark."""
        self.rewind()


def skip_integers(generator: torch.Generator, tokens: int, vocabulary: int) -> None:
    """vLLM on CPUs: one 31-bit integer a token. One draw of many leaves the state that many of one leave."""
    if tokens:
        torch.randint(0, 2**31, (tokens,), generator=generator, dtype=torch.long)


def skip_exponentials(generator: torch.Generator, tokens: int, vocabulary: int) -> None:
    """vLLM on GPUs, and its plain sampler: exponential noise over the vocabulary for every token."""
    _skip_noise(generator, tokens, vocabulary, torch.float32)


def skip_double_exponentials(generator: torch.Generator, tokens: int, vocabulary: int) -> None:
    """The same noise in double precision (vLLM's `use_fp64_gumbel`)."""
    _skip_noise(generator, tokens, vocabulary, torch.float64)


def _skip_noise(generator: torch.Generator, tokens: int, vocabulary: int, dtype: torch.dtype) -> None:
    noise = torch.empty(vocabulary, device=generator.device, dtype=dtype)
    for _ in range(tokens):
        noise.exponential_(generator=generator)


WAYS: tuple[Draw, ...] = (skip_integers, skip_exponentials, skip_double_exponentials)
