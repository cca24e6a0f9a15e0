"""What several benchmarks run."""
