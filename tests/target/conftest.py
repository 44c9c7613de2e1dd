"""What tests of the CPU kernels share."""

import pytest

from services.target.kernels.cpu import library


@pytest.fixture
def matrix_unit():
    """Switches between the processor's matrix unit and vectors."""
    use = library.load().outrider_use_matrix_unit
    before = use(1)
    has_one = use(before)
    if not has_one:
        pytest.skip("this processor has no matrix unit")
    yield use
    use(before)


@pytest.fixture(params=["matrix unit", "vectors"])
def multiplied_by(request):
    """On processors with a matrix unit both ways are tested; others know one."""
    if not library.available():
        pytest.skip("the CPU kernels do not compile on this machine")
    use = library.load().outrider_use_matrix_unit
    before = use(request.param == "matrix unit")
    now = use(before)
    if request.param == "matrix unit" and not now:
        pytest.skip("this processor has no matrix unit")
    use(now)
    yield
    use(before)
