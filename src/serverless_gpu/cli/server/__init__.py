"""Commands that speak with a server.

up.py          up                     the server itself
operating.py   server                 its settings, its unit for systemd
people.py      login · whoami · user · team
tokens.py      token
machines.py    nodes · node
dividing.py    queue · pools · pool · share            who waits, who gets how much
policies.py    policy                 what runs have to have, and may ask for
audit.py       audit                  who did what; audit_file.py a copy of it
usage.py       usage                  what was used and what it cost; usage_files.py the same as files
submitting.py  submit                 a script or a command as a run
"""
