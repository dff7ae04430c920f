"""FLUX.2 [klein] (Black Forest Labs): pictures from words and from up to four pictures, in four steps."""
