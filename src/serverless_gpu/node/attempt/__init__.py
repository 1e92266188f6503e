"""The directory of one attempt: its submission, claim, history, secrets, account and retention.

The supervisor, the agent and the uplink use this package. To read the code, start with `submission.py`.
"""
