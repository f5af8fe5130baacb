"""A long text to ask about: a lighthouse keeper's log, as long as wanted, no entry like another.

The same text for the same length, everywhere: entries come from a seeded choice of observations.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

MIN_PROMPT_TOKENS = 64
MAX_ENTRIES = 2_000
_SEED = 1_871

_WINDS = ("a light breeze", "a stiff wind", "half a gale", "a full gale", "hardly any wind", "gusts")
_FROM = ("the north", "the north-east", "the east", "the south", "the south-west", "the west")
_SEAS = (
    "the sea lay flat as slate",
    "a long swell ran in from the open water",
    "the breakers threw spray as high as the gallery",
    "the tide left the whole reef bare",
    "fog stood so thick that the rocks below were gone",
)
_SIGHTS = (
    "A brig passed close under the point and dipped her flag.",
    "Two fishing boats sheltered in the cove until evening.",
    "A flight of geese went over, very high, heading inland.",
    "The mail cutter could not land and turned back.",
    "A seal slept on the slip all morning and would not be moved.",
    "The survey ship anchored off the bar and took soundings.",
    "A steamer with a damaged funnel crept along the coast.",
)
_CHORES = (
    "Trimmed the wicks and polished the third lens panel.",
    "Wound the clockwork twice, for the weight had stuck in the night.",
    "Carried eleven cans of oil up from the store.",
    "Painted the north railing and mended the latch of the lower door.",
    "Wrote to the harbour office about the cracked pane.",
    "Cleaned soot from the chimney and set new putty in the lantern.",
    "Repaired the fog bell, whose hammer had worn thin.",
)
_LAMP = (
    "burned clear until dawn",
    "smoked and was trimmed at two",
    "was hidden by fog",
    "was seen from the bar",
)

TITLE = "The log of the keeper of Sallow Point light\n\n"
QUESTION = (
    "\n\nYou have read the log above. Write a long letter to the harbour office that tells, in full "
    "sentences, what happened at the light: the weather, the ships, the repairs, and what the keeper needs."
)


def entries(count: int) -> str:
    """The first `count` entries of the log."""
    draw = random.Random(_SEED)  # noqa: S311 - a story, not a secret
    return "\n".join(
        f"Day {day}. There was {draw.choice(_WINDS)} from {draw.choice(_FROM)}, and {draw.choice(_SEAS)}. "
        f"{draw.choice(_SIGHTS)} {draw.choice(_CHORES)} The lamp {draw.choice(_LAMP)}."
        for day in range(1, count + 1)
    )


def messages(count: int) -> list[dict[str, str]]:
    """The chat that asks about the first `count` entries."""
    return [{"role": "user", "content": TITLE + entries(count) + QUESTION}]


async def fit(
    prompt_tokens: int, count_tokens: Callable[[Sequence[dict[str, str]]], Awaitable[int]]
) -> list[dict[str, str]]:
    """The longest chat of at most `prompt_tokens` tokens, as counted by the engine."""
    low, high = 1, MAX_ENTRIES
    while low < high:
        middle = (low + high + 1) // 2
        if await count_tokens(messages(middle)) <= prompt_tokens:
            low = middle
        else:
            high = middle - 1
    return messages(low)
