"""Access flags: callers and their keys, the services' token, certificates."""
