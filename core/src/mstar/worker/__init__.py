"""A process that owns a rank: scheduler, engine and transport."""
