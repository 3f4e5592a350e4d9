"""The device side of Cleave Testbed, small enough for a phone."""
