"""Division of the machine: CPU cores of each process, and the shape of draft trees that fits them."""
