"""The HTTP routes: from a body to running generations."""
