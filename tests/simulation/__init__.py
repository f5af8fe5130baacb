"""A deterministic simulation of replication: many seeds, one thread, no sockets, no real time."""
