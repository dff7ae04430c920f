"""Placement and executors."""
