"""Figures 16 and 19 to 25 in our own design, drawn from result files and from nothing else."""
