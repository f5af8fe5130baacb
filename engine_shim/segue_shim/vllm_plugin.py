"""vLLM's general plugin (entry point group `vllm.general_plugins`): loaded in every process of vLLM.

Puts the API server's part of exact continuation in place; see `vllm_front_end`. Never fails.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("segue_shim")


def register() -> None:
    """Called by vLLM, in any of its processes and perhaps more than once."""
    try:
        from segue_shim import vllm_compat, vllm_front_end

        vllm_compat.adopt_logging()
        vllm_front_end.install()
    except Exception:
        logger.exception("segue: resumed answers will not begin with what was delivered")
