"""Per-request device state and the pools behind it. See :mod:`mstar.resources.base` for the contract."""
