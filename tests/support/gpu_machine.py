"""A machine with NVIDIA GPUs, as the project sees it: an answer of nvidia-smi in place of the driver's tool."""

from outrider.placement import devices
from outrider.supervisor import memory

H100 = "NVIDIA H100 80GB HBM3, 81559, 551, 0, 9.0, 580.65.06"
L4 = "NVIDIA L4, 23034, 494, 0, 8.9, 550.54.15"
RTX = "NVIDIA RTX PRO 6000 Blackwell, 97887, 636, 0, 12.0, 575.57.08"
V100 = "Tesla V100-SXM2-16GB, 16384, 224, 0, 7.0, 580.65.06"
OLD = "Tesla K80, 11441, 0, 0, 3.7, 470.82.01"


def smi(*cards):
    """What nvidia-smi prints for some cards."""
    return "".join(f"{i}, GPU-{i:08x}-aaaa, {card}\n" for i, card in enumerate(cards))


def put_gpus(monkeypatch, tmp_path, *cards, plugin=True, visible=None):
    """Give the machine GPUs. plugin: JAX has its plugin. visible: CUDA_VISIBLE_DEVICES."""
    node = tmp_path / "nvidiactl"
    node.touch()
    monkeypatch.setattr(devices, "_GPU", node)
    monkeypatch.setattr(devices, "_smi", lambda: smi(*cards))
    monkeypatch.setattr(memory, "jax_uses_gpus", lambda: plugin)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def take_gpus(monkeypatch, tmp_path):
    """A machine without a GPU, wherever the tests run."""
    monkeypatch.setattr(devices, "_GPU", tmp_path / "no-nvidiactl")
    monkeypatch.setattr(devices, "_PCI", tmp_path / "no-pci")
