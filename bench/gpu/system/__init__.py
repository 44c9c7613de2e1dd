"""The whole system on a GPU: target, draft service and gateway as three processes, measured over REST.

checkpoints.py      a random target whose text is known, and an EAGLE-3 head of the published shape
continuation.py     that text
simulated_trees.py  what a head drafts whose candidates are right with given probabilities
acceptance.py       replaces a drafter's trees by such ones, whose right tokens are those of that text
recording.py        spans and marks of an engine, in memory while it works, in files while it is idle
target.py           the target service with clocks
draft.py            the draft service with clocks, and with simulated acceptance
processes.py        starts the three processes
load.py             requests over REST, all sessions at a time
split.py            what a step's time consists of, and the timeline of some steps
run.py              cells, in turns, and the report
"""
