"""Division of the machine: CPU cores and device memory of each process, and the shape of draft trees that fits them."""
