"""SNAC, a codec in several time scales (Siuzdak et al., 2024), whose codes language models write."""
