"""Whisper (Radford et al. 2022, "Robust Speech Recognition via Large-Scale Weak Supervision")."""
