"""Showing what Crux sees and does."""
