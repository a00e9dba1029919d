"""One engine for many processes: owners and their leases, what they may ask for, and the sockets they come over."""
