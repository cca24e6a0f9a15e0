"""Simulation of Crux on a cluster: scenarios, workloads, traces over the fluid engine."""
