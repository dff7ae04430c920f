"""Fleets on virtual time: the real scheduler, steps that cost what steps of this size cost where they were measured."""
