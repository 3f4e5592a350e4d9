"""Benchmarks of the data plane, the training step and the emulator."""

import os

# As in `cleave run`, and before NumPy is imported. The server's own products are small. With two threads each waits for
# the other while devices keep the cores busy: what is checked in 0.3 ms took 6.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# PyTorch's threads spin while they wait for the next operation, on cores that the agents need: a step of OPT-125M took
# 2.4 times as long as plain PyTorch's, and 2.0 times without. Plain PyTorch alone is as fast either way.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
