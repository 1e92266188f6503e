"""Commands about nodes and pools: `nodes`, `node`, `join`, `pools`, `pool`, `queue`, `share`.

Each module is one command group. Start with `nodes.py`.
"""
