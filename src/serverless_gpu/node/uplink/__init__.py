"""The uplink: what makes a node of a server out of this machine. A local client that acts for the server."""
