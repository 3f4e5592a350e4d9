"""A pod: one process that hosts many emulated devices."""
