"""What one step of a service runs on its device: shapes, buffers, launches and graphs."""
