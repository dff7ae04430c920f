"""What a family declares: plain data, no torch."""
