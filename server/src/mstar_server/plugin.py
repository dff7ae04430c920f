"""The server, as a plugin."""
