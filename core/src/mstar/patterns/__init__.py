"""Graphs that repeat between families, with a few parameters each."""
