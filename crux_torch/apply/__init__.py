"""Carrying a plan out on this process's connections."""
