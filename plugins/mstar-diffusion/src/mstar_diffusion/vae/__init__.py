"""Autoencoders: pictures as latents, and back."""
