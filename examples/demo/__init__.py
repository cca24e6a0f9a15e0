"""Two training jobs on one congested link: without Crux, and with it."""
