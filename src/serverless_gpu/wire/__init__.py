"""What client, node and server say to each other over HTTP, and the connection that the first two of them use."""
