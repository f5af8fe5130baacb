"""Shared parts of the tests: a light engine, real daemon processes, waiting with a deadline."""
