"""The drafters: algorithms that expand nodes of draft trees.

A new drafter implements base.Drafter, or ModelDrafter if it runs a model; services/draft/process builds it.
"""
