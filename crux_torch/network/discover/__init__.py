"""A map of the network from the paths that probes took."""
