"""What contributors and CI run; nothing here is part of the installed package."""
