"""The router: an OpenAI-compatible proxy whose answers go on when the engine behind them dies.

Pure decisions: `request`, `sse`, `transcript`, `relay`, `resume`, `assemble`, `choose`, `health`. Shells
around them: `engines`, `daemons`, `upstream`, `takeover`, `generation`, `passthrough`, `client`, `app`.
It imports `segue_core` and nothing else of Segue.
"""
