"""The NCCL that is installed, run without a GPU: its own network code and its own communicators."""
