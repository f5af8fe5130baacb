"""Operators' tools: the `seguectl` command, the local cluster launcher, the demo and the benchmarks.

Talks to daemons and routers as anybody would, over HTTP and their command lines; imports neither.
"""
