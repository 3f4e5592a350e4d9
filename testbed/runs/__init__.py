"""One run: scenario, fleet, training, verdict."""
