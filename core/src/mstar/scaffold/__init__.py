"""New families: the files that ``mstar plugin new`` writes."""
