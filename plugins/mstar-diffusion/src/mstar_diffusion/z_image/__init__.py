"""Z-Image (Tongyi-MAI): a single-stream diffusion transformer, its turbo distilled to eight steps."""
