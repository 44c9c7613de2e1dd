"""The gateway as a process: start-up, listeners, worker processes."""
