"""Links shaped by the kernel: plans, netlink messages, probes."""
