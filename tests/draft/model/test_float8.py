"""Float8 numbers in the three formats of files, against PyTorch's reading of the same bytes."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from services.draft.model.weights.float8 import read_float8


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_every_float8_number_is_read_exactly(tmp_path, dtype):
    every = torch.arange(256, dtype=torch.uint8).reshape(16, 16).view(dtype)
    file = tmp_path / "model.safetensors"
    save_file({"before": torch.ones(3), "every": every, "after": torch.ones(5)}, file)
    found = read_float8(file, "every")
    assert found.shape == (16, 16)
    np.testing.assert_array_equal(found.astype(np.float32), every.float().numpy())
