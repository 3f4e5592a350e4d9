"""The model of a run: which one, whether its steps are exact, and fleets for models trained from Python."""
