"""Everything that crosses a process boundary, as typed and tagged msgspec structs.

`journal`: engine to daemon, through the ring. `local`: engine and daemon, over the unix socket.
`peer`: daemon to daemon. `request`: router to engine, inside a request. `status`: the HTTP contract.
"""

PROTOCOL_VERSION = 2
"""Raised when a message changes its meaning; a peer of another version is refused with a clear error."""
