"""The c10d backend: registers, creates, wraps and switches process groups."""
