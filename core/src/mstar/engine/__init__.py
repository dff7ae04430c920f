"""Runs one batch of one entry."""
