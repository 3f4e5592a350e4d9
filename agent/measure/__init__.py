"""Measures the speed of this device and its link."""
