"""Who may join: invitations, keys, admission, reputation, and the sockets that unknown clients can reach."""
