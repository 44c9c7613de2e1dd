"""What all targets of a pool must serve: one checkpoint, number formats, and the weights of the last update."""

from __future__ import annotations

from gateway.streams.availability import ReplicaState
from outrider.errors import ConfigError
from outrider.wire.v1 import common_pb2, target_pb2

Info = target_pb2.GetTargetInfoResponse


class OtherWeights(ConfigError):
    """A target fits except for its weights: it missed an update, or others did."""

    state = ReplicaState.AWAITING_WEIGHTS


class PoolWeights:
    """The facts that a target is compared with. A target restarts with the weights of its flags, and gets those of the
    last update again if they came from a folder.
    """

    def __init__(self, facts: Info) -> None:
        """facts: of a target that serves what all must serve."""
        self._facts = Info.FromString(facts.SerializeToString())
        self._former = {facts.first_fingerprint}  # fingerprints of the weights that updates have replaced

    @property
    def model(self) -> common_pb2.ModelInfo:
        """The model, with these weights."""
        return self._facts.model

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the weights."""
        return self._facts.model.fingerprint

    @property
    def version(self) -> str:
        """Label of the weights."""
        return self._facts.weight_version

    def changed(self, fingerprint: str, version: str, folder: str) -> None:
        """The weights have this fingerprint and label now. folder: that they came from; empty for tensors."""
        self._former.add(self.fingerprint)
        self._former.discard(fingerprint)
        self._facts.model.fingerprint, self._facts.weight_version = fingerprint, version
        self._facts.weights_folder = folder

    def check(self, address: str, facts: Info) -> None:
        """Raise ConfigError for a model or number format that differs, OtherWeights for weights alone."""
        expected = self._facts
        model, served = facts.model, expected.model
        first, others = facts.first_fingerprint, expected.first_fingerprint
        updated = first != "" and first == others  # same weights at start
        if model.fingerprint != served.fingerprint and not updated:
            raise ConfigError(
                f"the target at {address} serves {model.model_path}, fingerprint {model.fingerprint}; the model that "
                f"this gateway serves is {served.model_path}, fingerprint {served.fingerprint}; restart the gateway to "
                "change the model, or update the target's weights"
            )
        for flag, own, others in (
            ("--dtype", model.dtype, served.dtype),
            ("--kv-cache-dtype", facts.kv_cache_dtype, expected.kv_cache_dtype),
            ("--quantization", _quantization(facts), _quantization(expected)),
        ):
            if own != others:
                raise ConfigError(
                    f"the target at {address} computes with {flag} {own}, the others of its pool with {others}; "
                    "sessions may move between them, so give all the same"
                )
        if model.fingerprint != served.fingerprint:
            reason = "" if self._facts.weights_folder else ", which it cannot load itself, because they came as tensors"
            raise self.awaited(address, facts, reason)

    def awaited(self, address: str, facts: Info, reason: str) -> OtherWeights:
        """The error of a target that lacks the weights. reason: why it cannot load them, as the end of a clause."""
        return OtherWeights(
            f'the target at {address} awaits the weights "{self.version}", fingerprint {self.fingerprint}{reason}; '
            f'it has "{facts.weight_version}", fingerprint {facts.model.fingerprint}; update the target\'s weights'
        )

    def request_for(self, facts: Info) -> target_pb2.UpdateWeightsFromDiskRequest | None:
        """The update that a target lacks; None if it cannot load that itself, or has weights unknown here.

        Unknown weights may be newer: another gateway may have sent them.
        """
        if not self._facts.weights_folder or facts.model.fingerprint not in self._former:
            return None
        return target_pb2.UpdateWeightsFromDiskRequest(
            folder=self._facts.weights_folder,
            update=common_pb2.WeightUpdate(weight_version=self.version),
            fingerprint=self.fingerprint,
            replaced_fingerprint=facts.model.fingerprint,
        )


def _quantization(facts: Info) -> str:
    """The format of a target's weights: that of the flag, or those of a quantized file that it keeps, or none."""
    return facts.quantization or " and ".join(sorted(facts.weight_formats)) or "none"
