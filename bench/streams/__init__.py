"""The streaming path with engines that cost nothing: gateway, services and wire alone."""
