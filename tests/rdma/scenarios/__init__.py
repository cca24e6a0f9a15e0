"""What runs in the guest: each is a program of its own, and leaves steps and captures."""
