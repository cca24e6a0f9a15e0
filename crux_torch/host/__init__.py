"""This machine: GPUs, PCIe, NICs, RDMA devices."""
