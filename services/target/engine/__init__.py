"""The engine: plans, launches and settles steps, and holds the open sessions."""
