"""What the benchmark of pictures is made of."""
