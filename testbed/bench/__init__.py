"""Benchmarks of the data plane, the training step and the emulator."""
