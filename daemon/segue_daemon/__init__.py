"""The sidecar daemon: finds what changed in an engine's KV cache, ships it to peers, keeps theirs."""
