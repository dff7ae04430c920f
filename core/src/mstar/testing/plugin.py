"""The pytest plugin of M*. Imported by every pytest run of an environment with mstar-core: keep it light."""
