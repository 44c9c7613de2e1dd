"""What the gateway adds to a step: services, gateway and wire, with engines that only take time."""
