"""The directory of one attempt: its submission, claim, history, secrets, account and retention.

Supervisor, agent and uplink share it. Start with `submission.py`.
"""
