"""What the processes of Outrider share: speculation, paging, serving and the protocol; neither JAX nor PyTorch."""

import os

__version__ = "0.1.0"
PROTOCOL_VERSION = 3

# gRPC reads this once, when it is imported. With its EventEngine, a frame that arrives passes two threads of a pool
# before the thread that waits for it; without, the waiting thread reads the socket itself (docs/decisions/0028).
_EXPERIMENTS = "GRPC_EXPERIMENTS"
if "event_engine" not in os.environ.get(_EXPERIMENTS, ""):
    _others = os.environ.get(_EXPERIMENTS, "").strip()
    os.environ[_EXPERIMENTS] = ",".join(filter(None, (_others, "-event_engine_client", "-event_engine_listener")))
