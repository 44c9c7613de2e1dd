"""What every process needs from the operating system: lifecycle, CPU affinity, ports, child processes."""
