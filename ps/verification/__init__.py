"""Whether a product is right, and which device returned a wrong block."""
