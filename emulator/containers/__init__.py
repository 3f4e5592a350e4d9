"""The Docker side: engine, allotments, address ranges."""
