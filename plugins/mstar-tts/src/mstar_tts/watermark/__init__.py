"""Marks that nobody hears and a detector finds: that a sound was made by a machine, and by whose."""
