"""What a fake engine streams in APIs that the router passes through: events as vLLM words them."""

from __future__ import annotations

from typing import Any

_RESPONSE = {"id": "r", "object": "response", "created_at": 1, "model": "fake", "output": [], "tools": []} | {
    "parallel_tool_calls": False,
    "tool_choice": "auto",
}
_MESSAGE = {"id": "m", "type": "message", "role": "assistant", "model": "fake", "content": []}
FOREIGN: dict[str, list[dict[str, Any]]] = {
    "/v1/responses": [
        {"type": "response.created", "sequence_number": 0, "response": _RESPONSE},
        *(
            {
                "type": "response.output_text.delta",
                "sequence_number": number,
                "delta": ' "sequence_number": 99 ',
                "item_id": "i",
                "output_index": 0,
                "content_index": 0,
                "logprobs": [],
            }
            for number in range(1, 9)
        ),
        {"type": "response.completed", "sequence_number": 9, "response": _RESPONSE | {"status": "completed"}},
    ],
    "/v1/messages": [
        {"type": "message_start", "message": _MESSAGE | {"usage": {"input_tokens": 1, "output_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *(
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": "event: error"},
            }
            for _ in range(6)
        ),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_stop"},
    ],
}
"""Path to events; each has its name under `type`."""
