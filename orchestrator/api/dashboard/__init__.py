"""A page to look at what is going on, and what it is fed with."""
