"""The control plane: a queue, a database and an API. It never runs user code and never unpickles."""
