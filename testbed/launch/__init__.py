"""Where pods run: processes or containers."""
