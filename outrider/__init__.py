"""What two processes of Outrider need: speculation, paging, serving and the wire; neither JAX nor PyTorch."""

__version__ = "0.1.0"
PROTOCOL_VERSION = 2
