"""The compiled core. Shapes and laws: csrc/ops/<op>.h for operations, csrc/store/kv_store.h.

Every function raises ValueError for a bad argument, before anything has changed, and TypeError
where a torch.Tensor is expected and something else comes.
"""

from collections.abc import Sequence

from torch import Tensor

BLOCK_SLOTS: int
"""Slots of one block."""
NO_REPLACE: int
"""What ``replace`` says of a lane whose next token is appended."""
NOT_FINITE: int
"""As NO_REPLACE: nothing can be elected, since keys or queries are not finite."""

class OutOfBlocks(RuntimeError):
    """The pool has too few free blocks or rows; nothing was changed."""

class InternalError(RuntimeError):
    """A broken invariant of kvcore itself."""

class KvStore:
    """Sequences over the lanes of one engine. Keeps its tensors alive. One thread at a time.

    key_blocks, value_blocks: T [blocks, 16 * head_dim]; position: i32 [blocks, 16];
    block_table: i32 [rows, layers, kv_heads, max_blocks]; lane_len: i32 [rows, layers, kv_heads];
    seq_len: i32 [rows]; query_ring: T [rows, layers, q_heads, window, head_dim] or None;
    planes: (name, T [blocks, channels, 16], T [channels] that a slot begins with) each;
    row_states: (name, T [rows, ...], T [1] that a row begins with or None) each. Known names are
    "replace", i32 [rows, layers, kv_heads], and "not_finite", i32 [rows]: 1 + the smallest position
    whose key, value, query or attention was not finite, 0 for none;
    lane_state: u8 [states, bytes] with state_of i32 [rows, layers, kv_heads], or None.
    """

    def __init__(
        self,
        key_blocks: Tensor,
        value_blocks: Tensor,
        position: Tensor,
        block_table: Tensor,
        lane_len: Tensor,
        seq_len: Tensor,
        query_ring: Tensor | None = None,
        head_dim: int = ...,
        planes: Sequence[tuple[str, Tensor, Tensor]] = (),
        row_states: Sequence[tuple[str, Tensor, Tensor | None]] = (),
        lane_state: Tensor | None = None,
        state_of: Tensor | None = None,
        state_slots: int = 0,
    ) -> None: ...
    def num_replaced(self, seq: int) -> int:
        """Slots that the last extend overwrites; it cannot be undone if there are any."""

    def create(self) -> int: ...
    def release(self, seq: int) -> None: ...
    def is_live(self, seq: int) -> bool: ...
    def extend(self, seqs: Sequence[int], counts: Sequence[int], stream: int = 0) -> None: ...
    def blocks_to_extend(self, seqs: Sequence[int], counts: Sequence[int]) -> int: ...
    def truncate(self, seq: int, count: int) -> None:
        """Undo the newest ``count`` tokens, at most ``undoable``."""

    def undoable(self, seq: int) -> int:
        """Tokens since an extend overwrote a slot or an eviction dropped one."""

    def forget_replace(self, seq: int) -> None:
        """Every lane appends its next token, whatever was elected."""

    def elect(self, seqs: Sequence[int], slots: Tensor) -> None:
        """Name the slots that next tokens overwrite: i32 [seqs, layers, kv_heads], NO_REPLACE to
        append."""

    def take_states(self, seqs: Sequence[int], full: Tensor) -> None:
        """A lane state for every lane that holds ``full`` i32 [layers, kv_heads] slots."""

    def num_states(self, seq: int) -> int: ...
    def free_states(self) -> int: ...
    def fork(self, parent: int, count: int, copy: bool, stream: int = 0) -> list[int]: ...
    def blocks_to_fork(self, parent: int, count: int, copy: bool) -> int: ...
    def adopt(self, parent: int, child: int) -> None: ...
    def evict(
        self, seqs: Sequence[int], drop: Tensor, drop_count: Tensor, stream: int = 0
    ) -> int: ...
    def row(self, seq: int) -> int: ...
    def rows(self, seqs: Sequence[int]) -> list[int]: ...
    def seq_len(self, seq: int) -> int: ...
    def max_lane_len(self, seq: int) -> int: ...
    def total_slots(self, seq: int) -> int: ...
    def num_blocks(self, seq: int) -> int: ...
    def free_blocks(self) -> int: ...
    def free_rows(self) -> int: ...
    def num_sequences(self) -> int: ...
    def sequences(self) -> list[int]: ...
    def check_integrity(self) -> None: ...
    def fill_batch(
        self,
        seqs: Sequence[int],
        counts: Sequence[int],
        rows: Tensor,
        cu_tokens: Tensor,
        positions: Tensor,
    ) -> None:
        """Fill rows i32 [seqs], cu_tokens i32 [seqs + 1], positions i64 [tokens]; after extend."""

def append_kv(
    store: KvStore,
    layer: int,
    key: Tensor,
    value: Tensor,
    query: Tensor | None,
    rows: Tensor,
    cu_tokens: Tensor,
    stream: int = 0,
) -> None: ...
def attend(
    store: KvStore,
    layer: int,
    query: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scratch: Tensor,
    rows: Tensor,
    cu_tokens: Tensor,
    scale: float,
    observe_rkv: RkvSettings | None = None,
    accumulate: bool = False,
    stream: int = 0,
) -> None: ...

class RkvSettings:
    """How the fused R-KV pass scores; meanings as in ``EvictionConfig``."""

    def __init__(self, protect: int, kernel: int, mix: float, threshold: float) -> None: ...

def build_rkv_state(
    store: KvStore,
    rows: Tensor,
    full: Tensor,
    scratch: Tensor,
    scale: float,
    settings: RkvSettings,
    stream: int = 0,
) -> None: ...
def build_rkv_state_scratch_bytes(store: KvStore) -> int:
    """For the current number of threads."""

def rkv_state_bytes(slots: int, window: int, head_dim: int) -> int:
    """Of one lane."""

def attend_scratch_bytes(store: KvStore) -> int:
    """For the current number of threads."""

def score_rkv(
    store: KvStore,
    rows: Tensor,
    score: Tensor,
    scratch: Tensor,
    protect: int,
    kernel: int,
    mix: float,
    threshold: float,
    pool_first: bool = False,
    stream: int = 0,
    scale: float | None = None,
) -> None:
    """scale: of the attention; None is 1 / sqrt(head_dim)."""

def score_rkv_scratch_bytes(store: KvStore, max_slots: int) -> int:
    """For the current number of threads."""

def score_random(
    store: KvStore, rows: Tensor, score: Tensor, seed: int, protect: int, stream: int = 0
) -> None: ...
def score_keys(
    store: KvStore, rows: Tensor, score: Tensor, kind: int, protect: int, stream: int = 0
) -> None: ...
def score_tova(
    store: KvStore,
    rows: Tensor,
    score: Tensor,
    protect: int,
    stream: int = 0,
    scale: float | None = None,
) -> None:
    """scale: of the attention; None is 1 / sqrt(head_dim)."""

def select_slots(
    store: KvStore,
    rows: Tensor,
    score: Tensor,
    keep: Tensor,
    drop: Tensor,
    drop_count: Tensor,
    stream: int = 0,
) -> None: ...
def copy_blocks(store: KvStore, src: Tensor, dst: Tensor, stream: int = 0) -> None: ...
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    gated: bool = False,
    stream: int = 0,
) -> None: ...
def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    rng_key: Tensor,
    rng_counter: Tensor,
    token: Tensor,
    entropy: Tensor,
    logprob: Tensor,
    scratch: Tensor,
    vocab: int,
    stream: int = 0,
) -> None: ...
def sample_tokens_scratch_bytes(columns: int) -> int:
    """For the current number of threads."""

class TokenBytes:
    """The bytes that every token id stands for; immutable."""

    def __init__(self, tokens: Sequence[bytes]) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, id: int) -> bytes: ...

class CandidateMonitor:
    """Text, step end and degeneration of all running candidates; csrc/detect/candidate_monitor.h.

    The firing codes of ``push`` are those of ``Firing`` in csrc/detect/degeneration_detector.h.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        *,
        entropy: bool = ...,
        entropy_threshold: float = ...,
        entropy_window: int = ...,
        entropy_guard: int = ...,
        gzip: bool = ...,
        gzip_threshold: float = ...,
        gzip_window: int = ...,
        gzip_exact: bool = ...,
        repetition: bool = ...,
        repetition_max_pattern_size: int = ...,
        repetition_min_count: int = ...,
        repetition_min_tokens: int = ...,
    ) -> None: ...
    def open(self, detect: bool, separators: Sequence[bytes] = ...) -> int: ...
    def close(self, id: int) -> None: ...
    def num_open(self) -> int: ...
    def push(
        self, ids: Tensor, tokens: Tensor, entropy: Tensor, firing: Tensor, step_end: Tensor
    ) -> None:
        """ids, tokens i64 [n], entropy f32 [n]; firing, step_end u8 [n], out."""

    def text(self, id: int) -> bytes: ...
    def step_end(self, id: int) -> int:
        """Byte offset behind the delimiter, or -1."""

    def num_tokens(self, id: int) -> int: ...
    def max_mean_entropy(self, id: int) -> float: ...
    def min_gzip_ratio(self, id: int) -> float: ...
    def gzip_ratio(self, id: int) -> float: ...
    def fired_at(self, id: int) -> int: ...

def gzip_size(data: bytes) -> int:
    """Bytes of ``gzip.compress(data)`` by the classic zlib at level 9."""

def hash_key(key: int, word: int) -> int:
    """Fold one more word into a random key; all are in [0, 2**64)."""

def set_num_threads(n: int) -> None: ...
def num_threads() -> int: ...
def parallel_backend() -> str:
    """Where the threads come from: "openmp (<library>)" or "own pool"."""

def isa() -> str:
    """The instruction set level in use: base, v3, v4 or bf16."""

def isa_supported(name: str) -> bool: ...
def set_isa(name: str) -> None: ...
def cuda_built() -> bool: ...
def version() -> str: ...
def describe_tensor(tensor: Tensor) -> tuple[int, str, str, tuple[int, ...], tuple[int, ...]]:
    """(address, device, dtype, shape, stride in elements) as the core sees the tensor."""

def uses_dlpack() -> bool: ...
def set_uses_dlpack(enabled: bool) -> None:
    """False reads tensors by their attributes, as with an old torch; for tests."""
