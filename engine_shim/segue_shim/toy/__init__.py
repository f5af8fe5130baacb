"""A toy engine built on `Exporter`: how to give an engine of one's own to Segue, in four short files.

`model` has the pages and computes KV, `batch` decides what a step does, `engine` ties both to the daemon,
`server` speaks HTTP. Run it with `python -m segue_shim.toy --help`. It needs torch and no weights;
`seguectl bench chaos` kills it by the hundred.
"""
