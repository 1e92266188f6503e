"""What tests of the web pages share: a server with much in its database, and a browser that is signed in."""
