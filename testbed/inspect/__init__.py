"""Inspects traces and kernel links."""
