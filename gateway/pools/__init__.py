"""Which replica of a service gets a session."""
