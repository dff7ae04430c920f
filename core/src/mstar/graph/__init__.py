"""Walks at run time: routing of values, loops and streams."""
