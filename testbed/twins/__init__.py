"""Real devices beside their emulated twins: calibration and comparison."""
