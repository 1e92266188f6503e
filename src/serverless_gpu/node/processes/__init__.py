"""Processes of a node: starting one, ending a whole tree, shared memory, the rendezvous port.

The supervisor and the agent call it. Start with `process_tree.py`.
"""
