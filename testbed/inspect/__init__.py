"""Looking at traces and kernel links."""
