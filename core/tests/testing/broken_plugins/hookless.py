"""A module that forgot to be a plugin."""
