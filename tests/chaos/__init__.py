"""`make chaos`: faults against a running system, each with texts that must stay the same.

Each process has a network namespace, and a program of ours carries their packets, so that a kernel without netem does.
Clients live in a namespace of their own, the supervisor's children in theirs.
"""
