"""The papers' figures, run again."""
