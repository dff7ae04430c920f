"""Where weights come from and how they reach the modules."""
