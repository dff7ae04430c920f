"""Videos that are made while nobody waits on the line: jobs, what is kept of them, and where."""
