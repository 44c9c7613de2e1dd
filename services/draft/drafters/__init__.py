"""The drafters: algorithms that say which tokens may follow a node of a speculation tree."""
