"""Usage policies: their routes, attachment to principals, and admission of a run under a policy.

Submission calls `policy_admission.py`; operators use `policy_service.py`.
"""
