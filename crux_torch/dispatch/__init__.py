"""GPUs for a job: an exact search by bandwidth, beside running jobs, with LiteGD's predictor."""
