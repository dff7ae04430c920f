"""``/v1/responses``: the request turned into a chat, the answer as items and events, and what is kept of both."""
