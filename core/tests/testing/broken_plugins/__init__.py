"""Plugins that are wrong on purpose, one defect each: what the conformance suite must find."""
