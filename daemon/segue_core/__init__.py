"""What Segue's processes agree on: messages, framing, geometry, journal, settings, errors.

A leaf: it imports none of the processes. The modules that the engine shim uses
(`clock`, `content_key`, `errors`, `framing`, `geometry`, `ring` and `messages`) need msgspec and the
standard library only, because they run inside somebody else's environment.
"""

__version__ = "0.1.0"
