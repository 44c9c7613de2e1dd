"""`outrider draft --online`: a draft that is trained on the traffic that it serves.

The drafter records sessions into a replay buffer; a learner in a background thread trains on it, evaluates, and hands
better weights over to the serving programs.
"""
