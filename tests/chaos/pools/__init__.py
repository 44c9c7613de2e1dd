"""`make chaos ARGS=pools`: a gateway, two targets and two drafts on five hosts; the pools change and break under load.

Each process has a network namespace; delay and loss are between all of them.
"""
