"""Hidden states for feature-based drafters: capture, fusion, and the store beside cached prefix pages.

`features` decides which rows of a step are captured and sends them; `fusion` turns captured states into rows of the
wire; `registry` keeps the drafters' specifications; `deferred` fuses many steps at once; `store` keeps rows of cached
pages.
"""
