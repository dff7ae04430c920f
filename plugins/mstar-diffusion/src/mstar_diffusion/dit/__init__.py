"""What diffusion transformers have in common: patches, time, rotary positions on several axes, modulation,
attention."""
