"""The store that the jobs of a cluster share: its interface, its server, its clients.

Nothing here imports torch: the server is a process of its own, which starts in an instant.
"""
