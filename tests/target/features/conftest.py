"""A target of eight layers, and transformers' hidden states of its texts."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.target.driving import load_model
from tests.support.target.features import LAYERS
from tests.support.tiny import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("deep"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def truth(folder):
    """All of transformers' hidden states of a text: [layer] -> [n, width]; the last has passed the final norm."""
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def states(tokens):
        with torch.no_grad():
            return [s[0].numpy() for s in module(torch.tensor([tokens]), output_hidden_states=True).hidden_states]

    return states
