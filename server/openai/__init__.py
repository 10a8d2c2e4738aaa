"""OpenAI's routes, with the further fields that vLLM's clients send."""
