"""Agreement between the jobs of a cluster: stores, records, leaders, plans."""
