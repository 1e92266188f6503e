"""Sessions hold devices and warm processes between calls, and actors live in them. Start with `session.py`."""
