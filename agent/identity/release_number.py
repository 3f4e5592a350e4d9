"""The agent's release number. In a bundle, android/bundle.py writes the bundle's own number here."""

from __future__ import annotations

RELEASE = 0  # a checkout or a development build: older than any release
