from outrider.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENSOR_FORMAT_UNSPECIFIED: _ClassVar[TensorFormat]
    TENSOR_FORMAT_PICKLE: _ClassVar[TensorFormat]
TENSOR_FORMAT_UNSPECIFIED: TensorFormat
TENSOR_FORMAT_PICKLE: TensorFormat

class GetTargetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTargetInfoResponse(_message.Message):
    __slots__ = ("protocol_version", "software_version", "model", "eos_token_ids", "max_session_tokens", "max_running_sessions", "max_draft_tokens", "page_size", "kv_cache_dtype", "weight_version", "first_fingerprint", "draft_sources", "weights_folder", "max_update_bytes", "ranks", "weight_formats", "step_weight_megabytes", "shared_fingerprint", "quantization")
    class WeightFormatsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SOURCES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FOLDER_FIELD_NUMBER: _ClassVar[int]
    MAX_UPDATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMATS_FIELD_NUMBER: _ClassVar[int]
    STEP_WEIGHT_MEGABYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    software_version: str
    model: _common_pb2.ModelInfo
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_session_tokens: int
    max_running_sessions: int
    max_draft_tokens: int
    page_size: int
    kv_cache_dtype: str
    weight_version: str
    first_fingerprint: str
    draft_sources: _containers.RepeatedScalarFieldContainer[_common_pb2.DraftSource]
    weights_folder: str
    max_update_bytes: int
    ranks: int
    weight_formats: _containers.ScalarMap[str, int]
    step_weight_megabytes: int
    shared_fingerprint: str
    quantization: str
    def __init__(self, protocol_version: _Optional[int] = ..., software_version: _Optional[str] = ..., model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_session_tokens: _Optional[int] = ..., max_running_sessions: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., page_size: _Optional[int] = ..., kv_cache_dtype: _Optional[str] = ..., weight_version: _Optional[str] = ..., first_fingerprint: _Optional[str] = ..., draft_sources: _Optional[_Iterable[_Union[_common_pb2.DraftSource, str]]] = ..., weights_folder: _Optional[str] = ..., max_update_bytes: _Optional[int] = ..., ranks: _Optional[int] = ..., weight_formats: _Optional[_Mapping[str, int]] = ..., step_weight_megabytes: _Optional[int] = ..., shared_fingerprint: _Optional[str] = ..., quantization: _Optional[str] = ...) -> None: ...

class UpdateWeightsFromDiskRequest(_message.Message):
    __slots__ = ("folder", "update", "fingerprint", "replaced_fingerprint")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    folder: str
    update: _common_pb2.WeightUpdate
    fingerprint: str
    replaced_fingerprint: str
    def __init__(self, folder: _Optional[str] = ..., update: _Optional[_Union[_common_pb2.WeightUpdate, _Mapping]] = ..., fingerprint: _Optional[str] = ..., replaced_fingerprint: _Optional[str] = ...) -> None: ...

class UpdateWeightsFromDiskResponse(_message.Message):
    __slots__ = ("weights",)
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    weights: _common_pb2.WeightFacts
    def __init__(self, weights: _Optional[_Union[_common_pb2.WeightFacts, _Mapping]] = ...) -> None: ...

class UpdateWeightsFromTensorRequest(_message.Message):
    __slots__ = ("update", "content", "format")
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    update: _common_pb2.WeightUpdate
    content: bytes
    format: TensorFormat
    def __init__(self, update: _Optional[_Union[_common_pb2.WeightUpdate, _Mapping]] = ..., content: _Optional[bytes] = ..., format: _Optional[_Union[TensorFormat, str]] = ...) -> None: ...

class UpdateWeightsFromTensorResponse(_message.Message):
    __slots__ = ("weights",)
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    weights: _common_pb2.WeightFacts
    def __init__(self, weights: _Optional[_Union[_common_pb2.WeightFacts, _Mapping]] = ...) -> None: ...

class JoinWeightsGroupRequest(_message.Message):
    __slots__ = ("group_name", "address", "port", "rank", "world_size", "backend")
    GROUP_NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    group_name: str
    address: str
    port: int
    rank: int
    world_size: int
    backend: str
    def __init__(self, group_name: _Optional[str] = ..., address: _Optional[str] = ..., port: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., backend: _Optional[str] = ...) -> None: ...

class JoinWeightsGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveWeightsGroupRequest(_message.Message):
    __slots__ = ("group_name",)
    GROUP_NAME_FIELD_NUMBER: _ClassVar[int]
    group_name: str
    def __init__(self, group_name: _Optional[str] = ...) -> None: ...

class LeaveWeightsGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TensorFacts(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class UpdateWeightsFromGroupRequest(_message.Message):
    __slots__ = ("update", "group_name", "tensors", "flattened")
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    GROUP_NAME_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    FLATTENED_FIELD_NUMBER: _ClassVar[int]
    update: _common_pb2.WeightUpdate
    group_name: str
    tensors: _containers.RepeatedCompositeFieldContainer[TensorFacts]
    flattened: bool
    def __init__(self, update: _Optional[_Union[_common_pb2.WeightUpdate, _Mapping]] = ..., group_name: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[TensorFacts, _Mapping]]] = ..., flattened: _Optional[bool] = ...) -> None: ...

class UpdateWeightsFromGroupResponse(_message.Message):
    __slots__ = ("weights",)
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    weights: _common_pb2.WeightFacts
    def __init__(self, weights: _Optional[_Union[_common_pb2.WeightFacts, _Mapping]] = ...) -> None: ...

class GetSharedWeightsRequest(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class GetSharedWeightsResponse(_message.Message):
    __slots__ = ("fingerprint", "content")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    content: bytes
    def __init__(self, fingerprint: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseGenerationRequest(_message.Message):
    __slots__ = ("mode",)
    MODE_FIELD_NUMBER: _ClassVar[int]
    mode: _common_pb2.PauseMode
    def __init__(self, mode: _Optional[_Union[_common_pb2.PauseMode, str]] = ...) -> None: ...

class PauseGenerationResponse(_message.Message):
    __slots__ = ("aborted_sessions",)
    ABORTED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    aborted_sessions: int
    def __init__(self, aborted_sessions: _Optional[int] = ...) -> None: ...

class ContinueGenerationRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ContinueGenerationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseMemoryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseMemoryResponse(_message.Message):
    __slots__ = ("released_bytes",)
    RELEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    released_bytes: int
    def __init__(self, released_bytes: _Optional[int] = ...) -> None: ...

class ResumeMemoryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeMemoryResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ConfigureFeaturesRequest(_message.Message):
    __slots__ = ("spec", "fusion")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    FUSION_FIELD_NUMBER: _ClassVar[int]
    spec: _common_pb2.FeatureSpec
    fusion: bytes
    def __init__(self, spec: _Optional[_Union[_common_pb2.FeatureSpec, _Mapping]] = ..., fusion: _Optional[bytes] = ...) -> None: ...

class ConfigureFeaturesResponse(_message.Message):
    __slots__ = ("layers", "width", "row_bytes")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    width: int
    row_bytes: int
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., width: _Optional[int] = ..., row_bytes: _Optional[int] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("file_name", "content")
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    file_name: str
    content: bytes
    def __init__(self, file_name: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("opens", "proposals", "closes")
    OPENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    opens: _containers.RepeatedCompositeFieldContainer[_common_pb2.OpenSession]
    proposals: _common_pb2.ProposalBatch
    closes: bytes
    def __init__(self, opens: _Optional[_Iterable[_Union[_common_pb2.OpenSession, _Mapping]]] = ..., proposals: _Optional[_Union[_common_pb2.ProposalBatch, _Mapping]] = ..., closes: _Optional[bytes] = ...) -> None: ...

class LogprobBatch(_message.Message):
    __slots__ = ("commits", "positions", "token_counts", "top_counts", "logprobs", "top_tokens", "top_logprobs")
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    commits: bytes
    positions: bytes
    token_counts: bytes
    top_counts: bytes
    logprobs: bytes
    top_tokens: bytes
    top_logprobs: bytes
    def __init__(self, commits: _Optional[bytes] = ..., positions: _Optional[bytes] = ..., token_counts: _Optional[bytes] = ..., top_counts: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., top_tokens: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("commits", "errors", "load", "features", "logprobs")
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    commits: _common_pb2.CommitBatch
    errors: _containers.RepeatedCompositeFieldContainer[_common_pb2.SessionError]
    load: _common_pb2.EngineLoad
    features: _common_pb2.FeatureBatch
    logprobs: LogprobBatch
    def __init__(self, commits: _Optional[_Union[_common_pb2.CommitBatch, _Mapping]] = ..., errors: _Optional[_Iterable[_Union[_common_pb2.SessionError, _Mapping]]] = ..., load: _Optional[_Union[_common_pb2.EngineLoad, _Mapping]] = ..., features: _Optional[_Union[_common_pb2.FeatureBatch, _Mapping]] = ..., logprobs: _Optional[_Union[LogprobBatch, _Mapping]] = ...) -> None: ...
