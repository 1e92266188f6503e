"""Programs for contributors and CI. The installed package contains none of them."""
