"""Drafting ahead with a head that reads the target's features, on a core of its own behind a delayed network.

control.py  what a run's services do at present: mode and length of a step, by a file; what came of it, by another
target.py   the target service, whose steps have the time of a larger model
draft.py    the draft service, whose head drafts ahead, or not
network.py  the delay between gateway and draft service
theory.py   the expected throughput
run.py      modes in turns, and the report
"""
