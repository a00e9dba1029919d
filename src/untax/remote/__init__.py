"""An engine of another process, used as one's own: what is said between the two, and the client's side of it."""
