"""Benchmarks of the data plane, the training step and the emulator."""

import os

# As in `cleave run`, and before NumPy is imported. The server's own products are small. With two threads each waits for
# the other while devices keep the cores busy: what is checked in 0.3 ms took 6.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
