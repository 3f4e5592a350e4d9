"""`make bench-gate`: fails if a benchmark has become much worse, as a multiple of a yardstick of the same run."""
