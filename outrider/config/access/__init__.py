"""Flags that say who may reach what: callers and their keys, the services' token, certificates."""
