"""Emulated devices: the real protocol and arithmetic in modelled time."""
