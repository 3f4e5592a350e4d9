"""When each block goes out, and what happens when one is late, lost or wrong. Pure."""
