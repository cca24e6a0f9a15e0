"""What the network is: topology, builders, loaders, this host."""
