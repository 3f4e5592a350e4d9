"""Scenarios, the cleave command, launching and results."""
