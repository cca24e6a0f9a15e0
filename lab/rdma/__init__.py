"""A virtual machine with Soft-RoCE: verbs and RoCEv2 packets without RDMA hardware."""
