"""What a machine with a GPU shows: bytes that are equal, and how fast they got there. `run.sh` runs it.

Engine and daemon are processes of their own with the shim's and the daemon's own classes, as in life.
"""
