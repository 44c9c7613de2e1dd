"""Steps of the target and its attention kernel on a GPU, with a random model of 8 billion parameters."""
