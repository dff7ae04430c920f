"""The demo models, as a plugin."""
