"""Cost model, bounds, tilings and deferred products: which device computes which block. Pure."""
