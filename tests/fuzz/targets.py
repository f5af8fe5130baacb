"""All targets, by name, with their share of the frames."""

from __future__ import annotations

from fuzz.on_bulk import BulkTarget
from fuzz.on_control import ControlTarget, LinkTarget
from fuzz.on_daemon_http import DaemonHttpTarget
from fuzz.on_journal import JournalTarget
from fuzz.on_local import LocalTarget
from fuzz.on_router import RouterTarget
from fuzz.on_transcript import TranscriptTarget
from fuzz.target import Target

TARGETS: dict[str, tuple[type[Target], int]] = {
    kind.name: (kind, share)
    for kind, share in (
        (JournalTarget, 330),
        (LocalTarget, 15),
        (ControlTarget, 180),
        (LinkTarget, 180),
        (BulkTarget, 60),
        (DaemonHttpTarget, 4),
        (TranscriptTarget, 229),
        (RouterTarget, 2),
    )
}
"""The shares follow from what a frame costs: a connection of its own, or none."""
