"""What every process does: lifecycle, CPU affinity, ports, child processes."""
