"""Torture of a whole cluster: faults by a seeded plan, streams that are checked token by token."""
