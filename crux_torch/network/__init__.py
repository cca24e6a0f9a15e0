"""The network: topology, builders, loaders, paths, routes and probing."""
