"""Samples of what a rank did in, a JobProfile out."""
