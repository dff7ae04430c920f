"""The API side's building blocks: tokenizers, chat templates, text rendering. No torch."""
