"""The surface that users depend on, frozen: public names, protocols, stored formats.

    surface.txt       every public name, command, variable, route, message and stored field, one line per item
    recorded/<date>/  what a released or earlier version wrote: a home, a server's home, pickles

    python -m tests.e2e.stable.record             add new items to surface.txt; refuses where one was removed or changed
    python -m tests.e2e.stable.record --breaking  write removals and changes, too
    python -m tests.e2e.stable.record home DATE   record another folder with the version of today; earlier ones stay

Recordings are never edited: a version that cannot read them breaks its users. Tests load them through the public API
and the commands; only `places.py` names modules of the package that are not public.
"""
