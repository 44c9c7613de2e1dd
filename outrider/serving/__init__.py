"""What both services do alike: sessions, scheduling, the engine loop, its streams and the gRPC server around them."""
