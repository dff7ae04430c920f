"""Which ready work runs next, as which batch. No torch."""
