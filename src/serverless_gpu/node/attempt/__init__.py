"""The directory of one attempt: its submission, claim, history, secrets, account and retention.

Supervisor, agent and uplink use this package. To read the code, start with `submission.py`.
"""
