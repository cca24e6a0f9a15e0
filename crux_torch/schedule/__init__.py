"""Scheduling algorithms as pure functions, used by the live system and the simulator alike."""
