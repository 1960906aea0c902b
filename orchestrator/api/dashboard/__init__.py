"""The dashboard: a page, its routes, and the feed of events."""
