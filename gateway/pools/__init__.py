"""The members of the pools, what names them, and which of them runs a session."""
