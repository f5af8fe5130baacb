"""The router: one OpenAI-compatible endpoint over several engines; answers survive an engine's death."""
