"""Where the services run: Ray, placement, supervision and scaling. No token passes through here."""
