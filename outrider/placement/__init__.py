"""CPU cores of each process, and the tree shapes that suit them."""
