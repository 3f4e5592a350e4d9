"""Who may join: invitations, keys, admission, reputation, and the sockets that strangers reach."""
