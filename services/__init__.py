"""The draft service and the target service; strangers to one another."""
