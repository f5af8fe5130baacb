"""KV pages on NVIDIA GPUs: the driver, the thread that owns it, mappings and copies. Needs the `cuda`
extra."""
