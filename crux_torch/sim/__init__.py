"""What Crux would do on a cluster: scenarios, workloads, traces over the fluid engine."""
