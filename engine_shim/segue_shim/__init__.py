"""Inside the engine: exports its KV cache to the daemon beside it, and loads replicas back.

`exporter` serves any torch engine; `vllm_connector` is vLLM's way in, and `vllm_plugin` that of its API
server, where continued answers begin with what was delivered before. The rule of the whole package:
an engine never fails to start, waits without a deadline, or dies because of its sidecar.
"""
