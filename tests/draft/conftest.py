"""Compiled programs are cached in a folder of the test run, not in the user's cache. JAX gets several CPU devices."""

import jax
import pytest

from tests.support.draft.devices import DEVICES

# Refused once JAX has started; it is set here and not in the environment, which other processes of a run inherit.
jax.config.update("jax_num_cpu_devices", DEVICES)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
