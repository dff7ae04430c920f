"""``/v1/realtime``: OpenAI's protocol for talking with a model, or having speech written down as it comes."""
