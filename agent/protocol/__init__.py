"""The protocol between device and server: wire format, connection, clock, profile, units, errors."""
