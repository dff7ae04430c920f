"""Diffusion models of pictures: Z-Image and FLUX.2."""

__version__ = "0.1.0"
