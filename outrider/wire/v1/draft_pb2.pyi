from outrider.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetDraftInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDraftInfoResponse(_message.Message):
    __slots__ = ("protocol_version", "software_version", "drafters", "model", "max_session_tokens", "max_running_sessions", "features", "shared_tensors")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    SHARED_TENSORS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    software_version: str
    drafters: _containers.RepeatedScalarFieldContainer[str]
    model: _common_pb2.ModelInfo
    max_session_tokens: int
    max_running_sessions: int
    features: _common_pb2.FeatureSpec
    shared_tensors: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., software_version: _Optional[str] = ..., drafters: _Optional[_Iterable[str]] = ..., model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., max_session_tokens: _Optional[int] = ..., max_running_sessions: _Optional[int] = ..., features: _Optional[_Union[_common_pb2.FeatureSpec, _Mapping]] = ..., shared_tensors: _Optional[_Iterable[str]] = ...) -> None: ...

class GetFusionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetFusionResponse(_message.Message):
    __slots__ = ("content",)
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    def __init__(self, content: _Optional[bytes] = ...) -> None: ...

class FlushDraftRequest(_message.Message):
    __slots__ = ("only_fed", "target_folder", "shared_fingerprint", "weights_only")
    ONLY_FED_FIELD_NUMBER: _ClassVar[int]
    TARGET_FOLDER_FIELD_NUMBER: _ClassVar[int]
    SHARED_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ONLY_FIELD_NUMBER: _ClassVar[int]
    only_fed: bool
    target_folder: str
    shared_fingerprint: str
    weights_only: bool
    def __init__(self, only_fed: _Optional[bool] = ..., target_folder: _Optional[str] = ..., shared_fingerprint: _Optional[str] = ..., weights_only: _Optional[bool] = ...) -> None: ...

class FlushDraftResponse(_message.Message):
    __slots__ = ("wants_tensors",)
    WANTS_TENSORS_FIELD_NUMBER: _ClassVar[int]
    wants_tensors: bool
    def __init__(self, wants_tensors: _Optional[bool] = ...) -> None: ...

class UpdateSharedWeightsRequest(_message.Message):
    __slots__ = ("fingerprint", "content")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    content: bytes
    def __init__(self, fingerprint: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class UpdateSharedWeightsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProposeRequest(_message.Message):
    __slots__ = ("opens", "commits", "closes", "features")
    OPENS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    opens: _containers.RepeatedCompositeFieldContainer[_common_pb2.OpenSession]
    commits: _common_pb2.CommitBatch
    closes: bytes
    features: _common_pb2.FeatureBatch
    def __init__(self, opens: _Optional[_Iterable[_Union[_common_pb2.OpenSession, _Mapping]]] = ..., commits: _Optional[_Union[_common_pb2.CommitBatch, _Mapping]] = ..., closes: _Optional[bytes] = ..., features: _Optional[_Union[_common_pb2.FeatureBatch, _Mapping]] = ...) -> None: ...

class ProposeResponse(_message.Message):
    __slots__ = ("proposals", "errors", "load")
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    proposals: _common_pb2.ProposalBatch
    errors: _containers.RepeatedCompositeFieldContainer[_common_pb2.SessionError]
    load: _common_pb2.EngineLoad
    def __init__(self, proposals: _Optional[_Union[_common_pb2.ProposalBatch, _Mapping]] = ..., errors: _Optional[_Iterable[_Union[_common_pb2.SessionError, _Mapping]]] = ..., load: _Optional[_Union[_common_pb2.EngineLoad, _Mapping]] = ...) -> None: ...
