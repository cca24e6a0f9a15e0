"""Which source port leads over which path."""
