"""The seam, as a table: where the text of ids and the text that was delivered end at the same place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue_router.seam import ends_together

WORDS = st.lists(st.sampled_from([" a", " <", "b", "\n", "é", " 😀", ",", " ha"]), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("decoded", "delivered", "together"),
    [
        ("if a <", "if a <", True),
        ("if a <", "if a", False),
        ("if a <", "if a ", False),
        ("if a", "if a ", False),
        ("haha", "ha", False),
        ("hello \ufffd", "hello ", False),
        ("hello 😀", "hello ", False),
        ("Hello", " Hello", True),
        ("so it's, well.", "so it 's , well .", True),
        ("one<|im_end|>\ntwo", "one\ntwo", True),
        ("one<|im_end|>\n", "one\n", True),
        ("one <|im_end|>\n", "one \n", True),
        ("<b>one</b><|im_end|> two", "<b>one</b> two", True),
        ("<s> one", "one", True),
        ("one<|im_end|>", "one", False),
        ("one[/INST] two", "one two", True),
        ("", "", False),
    ],
)
def test_whole_answers(decoded: str, delivered: str, together: bool) -> None:
    """To the letter at the end; blanks that tokenizers strip and special tokens do not count inside."""
    assert ends_together(decoded, delivered, whole=True) is together


@pytest.mark.parametrize(
    ("decoded", "delivered", "together"),
    [
        ("\ufffd the end", "long before 😀 the end", True),
        ("before the end", "the end", True),
        ("xx the end", "yy the end", False),
        ("the end <", "long before the end", False),
    ],
)
def test_last_parts(decoded: str, delivered: str, together: bool) -> None:
    """They need not begin together, but what both have must agree."""
    assert ends_together(decoded, delivered, whole=False) is together


@given(WORDS, st.integers(0, 12))
def test_only_the_right_number_of_ids_fits(words: list[str], kept: int) -> None:
    """Of all prefixes of an answer only those that show the same text end with it."""
    delivered = "".join(words[:kept])
    for count in range(1, len(words) + 1):
        decoded = "".join(words[:count])
        if ends_together(decoded, delivered, whole=True):
            assert decoded.split() == delivered.split() or "".join(decoded.split()) == "".join(
                delivered.split()
            )
            assert decoded[len(decoded.rstrip()) :] == delivered[len(delivered.rstrip()) :]
