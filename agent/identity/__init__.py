"""This device's identity: keys, invitation, state on disk, signed updates."""
