"""Reads counters from a Prometheus endpoint: vLLM's prompt tokens by source, a daemon's bytes."""

from __future__ import annotations

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

PROMPT_TOKENS_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
"""vLLM's own count; label `source`: local_compute, local_cache_hit, external_kv_transfer."""
_TIMEOUT = aiohttp.ClientTimeout(total=10)


def sum_by_label(text: str, name: str, label: str = "") -> dict[str, float]:
    """The samples called `name`, added up by the value of `label` (empty: one sum under "")."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                key = sample.labels.get(label, "") if label else ""
                sums[key] = sums.get(key, 0.0) + sample.value
    return sums


async def scrape(session: aiohttp.ClientSession, url: str) -> str:
    """The text of `url`/metrics; empty if it does not answer."""
    try:
        async with session.get(f"{url}/metrics", timeout=_TIMEOUT) as answer:
            return await answer.text() if answer.status == 200 else ""
    except (aiohttp.ClientError, OSError, TimeoutError):
        return ""
