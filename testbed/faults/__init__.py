"""Faults: injection into runs, chaos, fuzzing, pauses."""
