"""Networks of namespaces and real training jobs on them: for the demo, benchmarks and tests."""
