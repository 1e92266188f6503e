"""Manages principals, teams, tokens and sessions, and decides which principals share a uid.

    principal_service   users, services, teams, tokens      session_service    browsers that are signed in
    password_service    passwords and links to set them     oidc_service       accounts at an identity provider
    device_service      logins of terminals (RFC 8628)      rate_limiter       limits for attempts to sign in

Start reading with `principal_service.py`.
"""
