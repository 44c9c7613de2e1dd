"""What the processes of Outrider share: speculation, paging, serving and the protocol; neither JAX nor PyTorch."""

__version__ = "0.1.0"
PROTOCOL_VERSION = 3
