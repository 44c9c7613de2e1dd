"""`outrider ray`: targets, drafts and gateways as actors in placement groups of a Ray cluster.

Ray decides where they run, and starts actors again when their process or node is lost. A controller actor keeps the
gateways' pools in line with what runs, and changes the number of replicas with their load. `ray` is imported only in
`platform.py`, `host.py` and `commands.py`, because it is an optional dependency.
"""
