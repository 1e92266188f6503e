"""The uplink: makes this machine a node of a server. A local client that acts for the server."""
