from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]

class GrammarKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_KIND_UNSPECIFIED: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_SCHEMA: _ClassVar[GrammarKind]
    GRAMMAR_KIND_REGEX: _ClassVar[GrammarKind]
    GRAMMAR_KIND_EBNF: _ClassVar[GrammarKind]

class DraftSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_SOURCE_UNSPECIFIED: _ClassVar[DraftSource]
    DRAFT_SOURCE_DRAFT_SERVICE: _ClassVar[DraftSource]
    DRAFT_SOURCE_PROMPT_LOOKUP: _ClassVar[DraftSource]
    DRAFT_SOURCE_EAGLE_HEAD: _ClassVar[DraftSource]
    DRAFT_SOURCE_QUANTIZED: _ClassVar[DraftSource]

class FeatureFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEATURE_FORMAT_UNSPECIFIED: _ClassVar[FeatureFormat]
    FEATURE_FORMAT_BFLOAT16: _ClassVar[FeatureFormat]
    FEATURE_FORMAT_FLOAT8_E4M3: _ClassVar[FeatureFormat]
    FEATURE_FORMAT_FLOAT32: _ClassVar[FeatureFormat]

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_ABORT: _ClassVar[PauseMode]
    PAUSE_MODE_RETRACT: _ClassVar[PauseMode]
    PAUSE_MODE_IN_PLACE: _ClassVar[PauseMode]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
GRAMMAR_KIND_UNSPECIFIED: GrammarKind
GRAMMAR_KIND_JSON_SCHEMA: GrammarKind
GRAMMAR_KIND_REGEX: GrammarKind
GRAMMAR_KIND_EBNF: GrammarKind
DRAFT_SOURCE_UNSPECIFIED: DraftSource
DRAFT_SOURCE_DRAFT_SERVICE: DraftSource
DRAFT_SOURCE_PROMPT_LOOKUP: DraftSource
DRAFT_SOURCE_EAGLE_HEAD: DraftSource
DRAFT_SOURCE_QUANTIZED: DraftSource
FEATURE_FORMAT_UNSPECIFIED: FeatureFormat
FEATURE_FORMAT_BFLOAT16: FeatureFormat
FEATURE_FORMAT_FLOAT8_E4M3: FeatureFormat
FEATURE_FORMAT_FLOAT32: FeatureFormat
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_ABORT: PauseMode
PAUSE_MODE_RETRACT: PauseMode
PAUSE_MODE_IN_PLACE: PauseMode

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "bias_tokens", "bias_values")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bias_tokens: bytes
    bias_values: bytes
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., bias_tokens: _Optional[bytes] = ..., bias_values: _Optional[bytes] = ...) -> None: ...

class StopConditions(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: GrammarKind
    text: str
    def __init__(self, kind: _Optional[_Union[GrammarKind, str]] = ..., text: _Optional[str] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("session_id", "tokens", "prompt_length", "sampling", "stop", "cache_salt", "logprobs", "prompt_logprobs", "feature_spec", "features_from", "grammar", "drafting_paused", "priority", "max_draft_tokens", "traceparent", "draft_sources", "caller", "scaled_logprobs")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_SPEC_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FROM_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_PAUSED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SOURCES_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SCALED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    tokens: bytes
    prompt_length: int
    sampling: SamplingParams
    stop: StopConditions
    cache_salt: str
    logprobs: int
    prompt_logprobs: int
    feature_spec: int
    features_from: int
    grammar: Grammar
    drafting_paused: bool
    priority: int
    max_draft_tokens: int
    traceparent: str
    draft_sources: _containers.RepeatedScalarFieldContainer[DraftSource]
    caller: str
    scaled_logprobs: bool
    def __init__(self, session_id: _Optional[int] = ..., tokens: _Optional[bytes] = ..., prompt_length: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[StopConditions, _Mapping]] = ..., cache_salt: _Optional[str] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., feature_spec: _Optional[int] = ..., features_from: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., drafting_paused: _Optional[bool] = ..., priority: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ..., draft_sources: _Optional[_Iterable[_Union[DraftSource, str]]] = ..., caller: _Optional[str] = ..., scaled_logprobs: _Optional[bool] = ...) -> None: ...

class FeatureSpec(_message.Message):
    __slots__ = ("spec_id", "layers", "final", "format", "norm_epsilon")
    SPEC_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    NORM_EPSILON_FIELD_NUMBER: _ClassVar[int]
    spec_id: int
    layers: _containers.RepeatedScalarFieldContainer[int]
    final: bool
    format: FeatureFormat
    norm_epsilon: float
    def __init__(self, spec_id: _Optional[int] = ..., layers: _Optional[_Iterable[int]] = ..., final: _Optional[bool] = ..., format: _Optional[_Union[FeatureFormat, str]] = ..., norm_epsilon: _Optional[float] = ...) -> None: ...

class FeatureBatch(_message.Message):
    __slots__ = ("session_ids", "first_positions", "row_counts", "block_bytes", "rows", "spec_ids")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SPEC_IDS_FIELD_NUMBER: _ClassVar[int]
    session_ids: bytes
    first_positions: bytes
    row_counts: bytes
    block_bytes: bytes
    rows: bytes
    spec_ids: bytes
    def __init__(self, session_ids: _Optional[bytes] = ..., first_positions: _Optional[bytes] = ..., row_counts: _Optional[bytes] = ..., block_bytes: _Optional[bytes] = ..., rows: _Optional[bytes] = ..., spec_ids: _Optional[bytes] = ...) -> None: ...

class ProposalBatch(_message.Message):
    __slots__ = ("session_ids", "anchor_lengths", "anchor_hashes", "node_counts", "tokens", "parents", "log_scores", "committed_lengths")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_HASHES_FIELD_NUMBER: _ClassVar[int]
    NODE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    LOG_SCORES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    session_ids: bytes
    anchor_lengths: bytes
    anchor_hashes: bytes
    node_counts: bytes
    tokens: bytes
    parents: bytes
    log_scores: bytes
    committed_lengths: bytes
    def __init__(self, session_ids: _Optional[bytes] = ..., anchor_lengths: _Optional[bytes] = ..., anchor_hashes: _Optional[bytes] = ..., node_counts: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., log_scores: _Optional[bytes] = ..., committed_lengths: _Optional[bytes] = ...) -> None: ...

class CommitBatch(_message.Message):
    __slots__ = ("session_ids", "base_lengths", "token_counts", "tokens", "root_hashes", "verified_counts", "accepted_counts", "finish_reasons", "cached_counts", "draft_budgets", "draft_sources")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROOT_HASHES_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    CACHED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_BUDGETS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SOURCES_FIELD_NUMBER: _ClassVar[int]
    session_ids: bytes
    base_lengths: bytes
    token_counts: bytes
    tokens: bytes
    root_hashes: bytes
    verified_counts: bytes
    accepted_counts: bytes
    finish_reasons: bytes
    cached_counts: bytes
    draft_budgets: bytes
    draft_sources: bytes
    def __init__(self, session_ids: _Optional[bytes] = ..., base_lengths: _Optional[bytes] = ..., token_counts: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., root_hashes: _Optional[bytes] = ..., verified_counts: _Optional[bytes] = ..., accepted_counts: _Optional[bytes] = ..., finish_reasons: _Optional[bytes] = ..., cached_counts: _Optional[bytes] = ..., draft_budgets: _Optional[bytes] = ..., draft_sources: _Optional[bytes] = ...) -> None: ...

class SessionError(_message.Message):
    __slots__ = ("session_id", "code", "message", "param")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    code: int
    message: str
    param: str
    def __init__(self, session_id: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...

class EngineLoad(_message.Message):
    __slots__ = ("running_sessions", "waiting_sessions", "free_pages", "total_pages", "step_microseconds", "step_tokens", "cached_pages", "weight_version", "preemptions", "drafters", "drafting_paused", "compilations", "online", "draft_stats", "paused")
    RUNNING_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    WAITING_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    STEP_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_PAUSED_FIELD_NUMBER: _ClassVar[int]
    COMPILATIONS_FIELD_NUMBER: _ClassVar[int]
    ONLINE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STATS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    running_sessions: int
    waiting_sessions: int
    free_pages: int
    total_pages: int
    step_microseconds: int
    step_tokens: int
    cached_pages: int
    weight_version: str
    preemptions: int
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterStats]
    drafting_paused: bool
    compilations: int
    online: OnlineStats
    draft_stats: DraftStats
    paused: bool
    def __init__(self, running_sessions: _Optional[int] = ..., waiting_sessions: _Optional[int] = ..., free_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., step_microseconds: _Optional[int] = ..., step_tokens: _Optional[int] = ..., cached_pages: _Optional[int] = ..., weight_version: _Optional[str] = ..., preemptions: _Optional[int] = ..., drafters: _Optional[_Iterable[_Union[DrafterStats, _Mapping]]] = ..., drafting_paused: _Optional[bool] = ..., compilations: _Optional[int] = ..., online: _Optional[_Union[OnlineStats, _Mapping]] = ..., draft_stats: _Optional[_Union[DraftStats, _Mapping]] = ..., paused: _Optional[bool] = ...) -> None: ...

class DraftStats(_message.Message):
    __slots__ = ("received_tokens", "unverified_tokens", "steps_without_drafter", "steps_paused", "steps_late", "steps_empty", "steps_not_selected", "lag_histogram", "lag_tokens")
    RECEIVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNVERIFIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_WITHOUT_DRAFTER_FIELD_NUMBER: _ClassVar[int]
    STEPS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    STEPS_LATE_FIELD_NUMBER: _ClassVar[int]
    STEPS_EMPTY_FIELD_NUMBER: _ClassVar[int]
    STEPS_NOT_SELECTED_FIELD_NUMBER: _ClassVar[int]
    LAG_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    LAG_TOKENS_FIELD_NUMBER: _ClassVar[int]
    received_tokens: int
    unverified_tokens: int
    steps_without_drafter: int
    steps_paused: int
    steps_late: int
    steps_empty: int
    steps_not_selected: int
    lag_histogram: _containers.RepeatedScalarFieldContainer[int]
    lag_tokens: int
    def __init__(self, received_tokens: _Optional[int] = ..., unverified_tokens: _Optional[int] = ..., steps_without_drafter: _Optional[int] = ..., steps_paused: _Optional[int] = ..., steps_late: _Optional[int] = ..., steps_empty: _Optional[int] = ..., steps_not_selected: _Optional[int] = ..., lag_histogram: _Optional[_Iterable[int]] = ..., lag_tokens: _Optional[int] = ...) -> None: ...

class OnlineStats(_message.Message):
    __slots__ = ("steps", "rows", "kept", "rejected", "accept_length_before", "accept_length_after", "seconds")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_LENGTH_BEFORE_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_LENGTH_AFTER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    rows: int
    kept: int
    rejected: int
    accept_length_before: float
    accept_length_after: float
    seconds: float
    def __init__(self, steps: _Optional[int] = ..., rows: _Optional[int] = ..., kept: _Optional[int] = ..., rejected: _Optional[int] = ..., accept_length_before: _Optional[float] = ..., accept_length_after: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class DrafterStats(_message.Message):
    __slots__ = ("name", "offered", "promised", "accepted", "chances")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CHANCES_FIELD_NUMBER: _ClassVar[int]
    name: str
    offered: int
    promised: float
    accepted: int
    chances: int
    def __init__(self, name: _Optional[str] = ..., offered: _Optional[int] = ..., promised: _Optional[float] = ..., accepted: _Optional[int] = ..., chances: _Optional[int] = ...) -> None: ...

class WeightUpdate(_message.Message):
    __slots__ = ("weight_version", "keep_cache", "abort_all_requests", "shared_tensors")
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    KEEP_CACHE_FIELD_NUMBER: _ClassVar[int]
    ABORT_ALL_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SHARED_TENSORS_FIELD_NUMBER: _ClassVar[int]
    weight_version: str
    keep_cache: bool
    abort_all_requests: bool
    shared_tensors: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, weight_version: _Optional[str] = ..., keep_cache: _Optional[bool] = ..., abort_all_requests: _Optional[bool] = ..., shared_tensors: _Optional[_Iterable[str]] = ...) -> None: ...

class WeightFacts(_message.Message):
    __slots__ = ("weight_version", "fingerprint", "replaced_tensors", "aborted_sessions", "retracted_sessions", "fingerprint_before", "whole", "folder", "shared_fingerprint")
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    REPLACED_TENSORS_FIELD_NUMBER: _ClassVar[int]
    ABORTED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    RETRACTED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_BEFORE_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    SHARED_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    weight_version: str
    fingerprint: str
    replaced_tensors: int
    aborted_sessions: int
    retracted_sessions: int
    fingerprint_before: str
    whole: bool
    folder: str
    shared_fingerprint: str
    def __init__(self, weight_version: _Optional[str] = ..., fingerprint: _Optional[str] = ..., replaced_tensors: _Optional[int] = ..., aborted_sessions: _Optional[int] = ..., retracted_sessions: _Optional[int] = ..., fingerprint_before: _Optional[str] = ..., whole: _Optional[bool] = ..., folder: _Optional[str] = ..., shared_fingerprint: _Optional[str] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model_path", "fingerprint", "architecture", "vocab_size", "vocab_hash", "context_length", "dtype")
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_HASH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    model_path: str
    fingerprint: str
    architecture: str
    vocab_size: int
    vocab_hash: str
    context_length: int
    dtype: str
    def __init__(self, model_path: _Optional[str] = ..., fingerprint: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., vocab_hash: _Optional[str] = ..., context_length: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...
