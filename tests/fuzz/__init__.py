"""Hostile input for everything that reads what others wrote: `make fuzz FRAMES=1000000`.

`mutate` makes frames that are nearly right, `target` says what a target is and what must hold, the modules
named `on_*` feed the real code, `run` does it many times and prints the line that does it again.
"""
