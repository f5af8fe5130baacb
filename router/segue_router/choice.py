"""One choice of an answer: what engines said of it, and what of that the client has.

What an event says goes in as a `Piece`; what of it the client does not have comes out. When another engine
says everything again (`replay`), what the client has is left out, and that it is the same is checked first.
Invariants: nothing is handed out twice; ids count as delivered once all of their text was handed out, and
text is handed out up to the last whole character; a piece that is refused changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from segue_router.errors import MalformedEvent, ReplayDiffers
from segue_router.resume import ChoiceProgress
from segue_router.seam import REPLACEMENT, SEAM_IDS

MAX_HELD_TOKENS = 16
"""Text that still ends in U+FFFD after so many tokens, or so many of them, is meant: it is handed out."""
MAIN = "content"
"""The name of the plain text among the texts of a choice, whatever its API calls it."""


@dataclass(slots=True)
class Piece:
    """What one event says of a choice. `more`: texts beside the plain one, by field of the delta (reasoning).
    `calls`: its tool-call deltas. `logprobs`: in the form of its API. `odd`: it says more than is understood,
    which can be handed out, but not compared."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    more: dict[str, str] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    odd: bool = False

    @property
    def parsed(self) -> bool:
        """Whether an engine's parser took part."""
        return bool(self.more or self.calls or self.odd)

    @property
    def brings(self) -> bool:
        """Whether there is anything of the answer in it."""
        return bool(self.text or self.ids or self.parsed or self.logprobs)


@dataclass(slots=True)
class Call:
    """A tool call that the client has, or has part of; `skip`: arguments that an engine will say again."""

    name: str = ""
    arguments: list[str] = field(default_factory=list)
    skip: str = ""
    again: bool = False


class Choice:
    """See the module."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.role_sent = self.prompt_sent = self.over = False
        """over: finished before the present engine began; what that one says of it is not new."""
        self.forget()

    def forget(self) -> None:
        """Nothing of it counts any more."""
        self.ids: list[int] = []
        self.delivered = 0
        self.finish_reason: str | None = None
        self.stop_reason: Any = None
        self.texts: dict[str, list[str]] = {}
        self.single = self.whole = True
        self.over = False
        self._held_text = ""
        self._calls: dict[int, Call] = {}
        self._ids_sent = self._forgotten = 0
        self._logprobs_sent = self._skip_logprobs = 0
        self._at = 0
        """Position in `ids` of the id that comes next; before their end while ids are said again."""
        self._skips: dict[str, str] = {}

    @property
    def tokens(self) -> int:
        """How many tokens were delivered."""
        return self._forgotten + self.delivered

    @property
    def arrived(self) -> int:
        """How many tokens engines named, with or without their text."""
        return self._forgotten + len(self.ids)

    @property
    def plain(self) -> bool:
        """Whether whole text that comes next can be handed out as it is."""
        caught_up = self._at == self.delivered == len(self.ids) and not self._skips and not self._held_text
        return caught_up and self.finish_reason is None

    @property
    def progress(self) -> ChoiceProgress:
        return ChoiceProgress(self.ids, self.delivered, self.finish_reason, self.stop_reason)

    @property
    def recent_text(self) -> str:
        """The plain text of (at least) the last SEAM_IDS delivered ids."""
        return "".join(self.texts.get(MAIN, ())[-SEAM_IDS:])

    def replay(self) -> None:
        """The engine that comes next says everything again, from the beginning."""
        self._at = 0
        self._held_text = ""
        self._skips = {name: "".join(pieces) for name, pieces in self.texts.items()}
        self._skip_logprobs = self._logprobs_sent
        for call in self._calls.values():
            call.skip, call.again = "".join(call.arguments), True
        self.over = self.finish_reason is not None

    def go_on_after(self, given_back: int, *, keep_sent: bool) -> None:
        """The engine that comes next goes on after what was delivered, less `given_back` ids.

        keep_sent: the client has their ids, if not their text: the same must come again.
        """
        self.delivered -= given_back
        del self.ids[max(self.delivered, self._ids_sent if keep_sent else 0) :]
        self._at = self.delivered
        self._held_text = ""
        self._skips = {}  # a replay that broke off is not gone on with

    def take(self, piece: Piece) -> Piece | None:
        """What of `piece` is to be handed out now; None: nothing yet.

        Raises ReplayDiffers, MalformedEvent.
        """
        if self.finish_reason is not None:
            raise MalformedEvent("output after the finish")
        new = self._without_known(piece)
        self._commit(piece)
        decorated = new.parsed or new.logprobs is not None
        if new.finish_reason is None and not decorated and not self._is_whole(new.text):
            self._held_text += new.text
            return None
        return self._hand_out(new, len(piece.ids))

    def take_plain(self, text: str, ids: list[int]) -> None:
        """The usual case of `take`, for whole text while `plain`: all of it is handed out."""
        self.ids += ids
        self._at = self.delivered = self._ids_sent = len(self.ids)
        self.single = len(ids) == 1
        self.whole = True
        pieces = self.texts.get(MAIN)
        if pieces is None:
            self.texts[MAIN] = [text]
        else:
            pieces.append(text)

    def shed(self, *, ids: bool, texts: bool) -> None:
        """Keep no more of what was delivered: it grew too large to be protected."""
        if ids and self.delivered == len(self.ids) == self._at:
            self._forgotten += self.delivered
            self.ids.clear()
            self.delivered = self._at = self._ids_sent = 0
        if texts:
            self.texts.clear()
            for call in self._calls.values():
                call.arguments.clear()

    def _is_whole(self, text: str) -> bool:
        """Whether the client may have this text: there is some, and it ends with a whole character."""
        if not text:
            return False
        held = max(len(self.ids) - self.delivered, self._held_text.count(REPLACEMENT))
        return not text.endswith(REPLACEMENT) or held > MAX_HELD_TOKENS

    def _hand_out(self, new: Piece, count: int) -> Piece:
        new.text = self._held_text + new.text
        self._held_text = ""
        self.single = count == 1
        self.whole = not new.text.endswith(REPLACEMENT)
        self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason
        new.ids = self.ids[self._ids_sent : self._at]
        self._ids_sent = max(self._ids_sent, self._at)
        self.delivered = max(self.delivered, self._at)
        for name, text in ((MAIN, new.text), *new.more.items()):
            if text:
                self.texts.setdefault(name, []).append(text)
        for delta in new.calls:
            self._record_call(delta)
        self._logprobs_sent += _entries(new.logprobs)
        return new

    # -- what is said again ---------------------------------------------------------------------

    def _without_known(self, piece: Piece) -> Piece:
        """`piece` less what the client has. Raises ReplayDiffers. Changes nothing."""
        known = self.ids[self._at : self._at + len(piece.ids)]
        if piece.ids[: len(known)] != known:
            raise ReplayDiffers("other token ids than those that were delivered")
        if piece.finish_reason is not None and self._owes(piece):
            raise ReplayDiffers("a finish before all that was delivered was said again")
        new = Piece(ids=piece.ids[len(known) :], stop_reason=piece.stop_reason, odd=piece.odd)
        new.finish_reason = piece.finish_reason
        new.text = self._rest(MAIN, piece.text)
        more = {name: self._rest(name, text) for name, text in piece.more.items()}
        new.more = {name: text for name, text in more.items() if text}
        skips = {index: call.skip for index, call in self._calls.items() if call.again}
        new.calls = [rest for delta in piece.calls if (rest := self._rest_of_call(delta, skips))]
        new.logprobs = _cut(piece.logprobs, self._skip_logprobs) if piece.logprobs else None
        return new

    def _owes(self, piece: Piece) -> bool:
        """Whether the client has more ids or text than the engine will have said with `piece`."""
        said = {MAIN: piece.text} | piece.more
        owed = any(len(skip) > len(said.get(name, "")) for name, skip in self._skips.items())
        return owed or self._at + len(piece.ids) < len(self.ids)

    def _rest(self, name: str, text: str) -> str:
        skip = self._skips.get(name, "")
        return _rest(text, skip, name) if skip else text

    def _rest_of_call(self, delta: dict[str, Any], skips: dict[int, str]) -> dict[str, Any]:
        """`delta` less what the client has of the call; `skips` shrinks by what it says again."""
        index = delta["index"]
        if index not in skips:
            return delta
        name, arguments = _function(delta)
        known = self._calls[index].name
        if name and known and name != known:
            raise ReplayDiffers("another tool call than the one that was delivered")
        rest = _rest(arguments, skips[index], "arguments")
        skips[index] = skips[index][len(arguments) :]
        function = {"arguments": rest} if rest else {}
        if name and not known:
            function["name"] = name
        return {"index": index, "function": function} if function else {}

    def _commit(self, piece: Piece) -> None:
        """`piece` is accepted: its ids are known, and what it said again is not awaited any more."""
        self.ids += piece.ids[len(self.ids) - self._at :]
        self._at += len(piece.ids)
        if self._skips:
            for name, text in ((MAIN, piece.text), *piece.more.items()):
                if name in self._skips:
                    self._skips[name] = self._skips[name][len(text) :]
            self._skips = {name: skip for name, skip in self._skips.items() if skip}
        for delta in piece.calls:
            call = self._calls.get(delta["index"])
            if call is not None and call.skip:
                call.skip = call.skip[len(_function(delta)[1]) :]
        if self._skip_logprobs:
            self._skip_logprobs -= min(self._skip_logprobs, _entries(piece.logprobs))

    def _record_call(self, delta: dict[str, Any]) -> None:
        call = self._calls.setdefault(delta["index"], Call())
        name, arguments = _function(delta)
        call.name = call.name or name
        if arguments:
            call.arguments.append(arguments)


def _rest(text: str, skip: str, what: str) -> str:
    """`text` after as much of `skip` as it says. Raises ReplayDiffers if it says something else."""
    common = min(len(text), len(skip))
    if text[:common] != skip[:common]:
        raise ReplayDiffers(f"other {what} than what was delivered")
    return text[common:]


def _function(delta: dict[str, Any]) -> tuple[str, str]:
    """Name and arguments in a tool-call delta; empty where it has none."""
    function = delta.get("function") or {}
    return function.get("name") or "", function.get("arguments") or ""


def _entries(logprobs: dict[str, Any] | None) -> int:
    """For how many tokens `logprobs` speaks (completions: parallel lists; chat: a list of objects)."""
    if not logprobs:
        return 0
    entries = logprobs.get("tokens", logprobs.get("content"))
    return len(entries) if isinstance(entries, list) else 0


def _cut(logprobs: dict[str, Any], count: int) -> dict[str, Any] | None:
    """`logprobs` without the first `count` tokens; None if none is left."""
    if not count:
        return logprobs
    if _entries(logprobs) <= count:
        return None
    return {key: value[count:] if isinstance(value, list) else value for key, value in logprobs.items()}
