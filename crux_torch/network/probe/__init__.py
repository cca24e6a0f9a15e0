"""Probing: the path of each source port."""
