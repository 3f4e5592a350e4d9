"""Invitations and signed releases, made on the server."""
