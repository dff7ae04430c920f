"""Orpheus: a Llama that writes SNAC's codes."""
