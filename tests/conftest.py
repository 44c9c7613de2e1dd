"""Set before anything imports a numeric library: the machine's cores are shared, and results must repeat."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import HealthCheck, settings

settings.register_profile("outrider", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("outrider")
