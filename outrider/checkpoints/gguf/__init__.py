"""GGUF files whose weights stay where they are: the record of a file in the folder that describes its model."""
