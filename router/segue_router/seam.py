"""The seam: whether the ids that were delivered and the text that was delivered end at the same place.

They need not: an event of several tokens may end inside a character, and parsers of chat answers hold text
back that may begin a tag (`<`). Going on after such ids would lose their text. Pure: texts in, a verdict out.
"""

from __future__ import annotations

import re

SEAM_IDS = 1_024
"""So many ids before the seam are compared with the text that came with them."""
MAX_GIVEN_BACK = 16
"""So many ids without their text are taken back and generated again."""
REPLACEMENT = "\ufffd"
"""What a detokenizer gives for bytes that are not (yet) a character."""
MAX_SPECIAL_CHARS = 64
_SPECIAL = re.compile(r"<[^<>\s]{1,62}>|\[[^\[\]\s]{1,62}\]")
"""A special token as tokenizers spell them; engines leave them out of the text they stream."""


def ends_together(decoded: str, delivered: str, *, whole: bool) -> bool:
    """Whether `decoded` (the text of the last ids) ends where `delivered` (what the client has) ends.

    whole: both are all of the answer, else its last part. Inner blanks do not count: tokenizers strip some
    when they decode a whole text. The end counts to the letter.
    """
    if decoded.endswith(REPLACEMENT) or not decoded or decoded[-1:] != delivered[-1:]:
        return False
    if _blanks_at_end(decoded) != _blanks_at_end(delivered):
        return False
    if not whole:
        decoded = decoded.lstrip(REPLACEMENT)  # its first id may go on with a character that began before
    ours, theirs = "".join(decoded.split()), "".join(delivered.split())
    while True:
        common = _common_end(ours, theirs)
        at = len(ours) - common
        if not whole and common in (len(ours), len(theirs)):
            return True
        special = _special_across(ours, at)
        if special is None:
            return common == len(ours) == len(theirs)
        theirs = theirs[: len(theirs) - common + special.end() - at]
        ours = ours[: special.start()]


def _special_across(text: str, at: int) -> re.Match[str] | None:
    """The special token that ends at `at` or goes across it."""
    first, last = max(0, at - MAX_SPECIAL_CHARS), at + MAX_SPECIAL_CHARS
    found = _SPECIAL.finditer(text, first, last)
    return next((match for match in found if match.start() < at <= match.end()), None)


def _blanks_at_end(text: str) -> str:
    """The blanks after its last visible character; special tokens among them are not visible."""
    blanks = ""
    while True:
        rest = text.rstrip()
        blanks = text[len(rest) :] + blanks
        special = _special_across(rest, len(rest)) if blanks else None
        if special is None:
            return blanks
        text = rest[: special.start()]


def _common_end(one: str, other: str) -> int:
    """Characters at the end that both have."""
    length = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b:
            break
        length += 1
    return length
