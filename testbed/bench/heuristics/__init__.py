"""Which heuristics of planning and scheduling earn their place, and whether more devices ever hurt."""
