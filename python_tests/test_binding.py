"""The extension's boundary: how tensors come in, how errors come out, who keeps what alive."""

import gc
import inspect
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from support.lanes import Lanes
from torch._subclasses import FakeTensorMode

from kvcore import ops
from kvcore.native import _C

DTYPES = ["float32", "bfloat16", "float16", "float64", "int32", "int64", "uint8", "bool"]

# Deprecation notices that torch prints when tensors of these kinds are made.
pytestmark = pytest.mark.filterwarnings("ignore:::torch", "ignore::UserWarning")


@pytest.fixture(params=[True, False], ids=["dlpack", "attributes"])
def way(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = _C.uses_dlpack()
    _C.set_uses_dlpack(request.param)
    yield request.param
    _C.set_uses_dlpack(before)


def small_lanes(**changes: int) -> Lanes:
    settings = {"kv_heads": 2, "q_heads": 4, "head_dim": 8, "window": 4, "max_slots": 64}
    return Lanes(**(settings | changes))


def run_python(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        cwd=os.path.dirname(__file__),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- tensors that can be read


@pytest.mark.parametrize("dtype", DTYPES)
def test_view_is_the_tensor(way: bool, dtype: str) -> None:
    t = torch.zeros((3, 4, 5), dtype=getattr(torch, dtype))
    want = (t.data_ptr(), "cpu", dtype, (3, 4, 5), (20, 5, 1))
    assert _C.describe_tensor(t) == want


@pytest.mark.parametrize(
    "cut",
    [
        lambda t: t[1:, ::2],
        lambda t: t.transpose(0, 1),
        lambda t: t[2, 3],
        lambda t: t.expand(2, 6, 8),
        lambda t: t[:, 3:3],
        lambda t: t[0, 0],
        lambda t: t.view(1, 1, 1, 1, 6, 8),
    ],
    ids=["slice", "transpose", "scalar", "expanded", "empty", "scalar0", "six dims"],
)
def test_strides_and_offsets_survive(
    way: bool, cut: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    t = cut(torch.arange(48.0).reshape(6, 8))
    address, _, _, shape, stride = _C.describe_tensor(t)
    assert (shape, stride) == (tuple(t.shape), t.stride())
    assert address == t.data_ptr() or t.numel() == 0


class Wrapped(torch.Tensor):
    pass


def test_grad_parameters_and_subclasses_are_read(way: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    result = parameter * 2
    subclass = torch.ones(3).as_subclass(Wrapped)
    for t in (parameter, result, subclass, torch.ones(3, requires_grad=True)):
        assert _C.describe_tensor(t)[0] == t.data_ptr()


def test_types_made_without_end_stay_correct(way: bool) -> None:
    for i in range(200):  # more types than the caster remembers
        kind = type(f"Kind{i}", (torch.Tensor,), {})
        t = torch.ones(2).as_subclass(kind)
        assert _C.describe_tensor(t)[0] == t.data_ptr()
        with pytest.raises(TypeError, match=f"tensor: expected torch.Tensor, got Other{i}"):
            _C.describe_tensor(type(f"Other{i}", (), {})())


# ---- what is refused, never dereferenced


def fake(*shape: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(shape)


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "list": (lambda: [1.0], TypeError, "got list"),
    "none": (lambda: None, TypeError, "got NoneType"),
    "array": (lambda: torch.ones(2).numpy(), TypeError, "got numpy.ndarray"),
    "class": (lambda: torch.Tensor, TypeError, "got "),
    "meta": (lambda: torch.ones(2, device="meta"), ValueError, "meta"),
    "fake": (lambda: fake(2), ValueError, "tensor"),
    "coo": (lambda: torch.eye(2).to_sparse(), ValueError, "tensor"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), ValueError, "tensor"),
    "mkldnn": (lambda: torch.ones(2, 2).to_mkldnn(), ValueError, "tensor"),
    "zero tensor": (lambda: torch._efficientzerotensor(2), ValueError, "without memory"),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
        ValueError,
        "[qQ][uU][iI]nt",
    ),
    "negated": (lambda: torch._neg_view(torch.ones(2)), ValueError, "resolve_neg"),
    "imaginary": (
        lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
        ValueError,
        "resolve_neg",
    ),
    "conjugated": (
        lambda: torch.ones(2, dtype=torch.complex64).conj(),
        ValueError,
        "expected dtype",
    ),
    "complex": (lambda: torch.ones(2, dtype=torch.complex64), ValueError, "torch.complex64"),
    "uint16": (lambda: torch.ones(2, dtype=torch.uint16), ValueError, "torch.uint16"),
    "fp8": (lambda: torch.ones(2).to(torch.float8_e4m3fn), ValueError, "float8_e4m3fn"),
    "seven dims": (lambda: torch.ones((1,) * 7), ValueError, "at most 6 dims, got 7"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_unreadable_tensors_are_refused_by_name(way: bool, kind: str) -> None:
    make, error, text = REFUSED[kind]
    with pytest.raises(error, match=f"^tensor: .*{text}"):
        _C.describe_tensor(make())


def test_batched_tensors_are_refused(way: bool) -> None:
    with pytest.raises(ValueError, match=r"^tensor: "):
        torch.vmap(lambda x: _C.describe_tensor(x) and x)(torch.ones(2, 3))


def test_a_refusal_leaves_no_exception_behind(way: bool) -> None:
    for _ in range(3):
        with pytest.raises(ValueError):
            _C.describe_tensor(torch.ones(2, device="meta"))
        assert _C.describe_tensor(torch.ones(2))[3] == (2,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_tensors_are_seen_and_refused_by_operations(way: bool) -> None:
    assert _C.describe_tensor(torch.ones(2, device="cuda"))[1] == "cuda"


# ---- choosing the way


def test_environment_switches_dlpack_off() -> None:
    program = "from kvcore.native import _C; print(_C.uses_dlpack())"
    assert run_python(program, KVCORE_NO_DLPACK="1") == "False"
    assert run_python(program, KVCORE_NO_DLPACK="0") == "True"
    assert run_python(program, KVCORE_NO_DLPACK="") == "True"


def test_threads_follow_torch_unless_told() -> None:
    program = (
        "import torch; torch.set_num_threads(3); from kvcore.native import _C; "
        "print(_C.num_threads())"
    )
    assert run_python(program, KVCORE_NUM_THREADS="") == "3"
    assert run_python(program, KVCORE_NUM_THREADS="1") == "1"


def test_isa_can_be_chosen_and_bad_names_are_refused() -> None:
    before = _C.isa()
    assert _C.isa_supported(before) and _C.isa_supported("base")
    try:
        _C.set_isa("base")
        assert _C.isa() == "base"
        with pytest.raises(ValueError, match="expected base, v3, v4 or bf16, got 'sse9'"):
            _C.set_isa("sse9")
        assert _C.isa() == "base"
    finally:
        _C.set_isa(before)
    with pytest.raises(ValueError, match="name"):
        _C.isa_supported("")


def test_thread_count_must_be_positive() -> None:
    before = _C.num_threads()
    with pytest.raises(ValueError):
        _C.set_num_threads(0)
    assert _C.num_threads() == before


# ---- the store


def test_store_keeps_its_tensors_alive_and_lets_them_go() -> None:
    lanes = small_lanes()
    alive = weakref.ref(lanes.key_blocks), weakref.ref(lanes.query_ring)
    store = lanes.store
    del lanes
    gc.collect()
    assert all(ref() is not None for ref in alive)
    store.extend([store.create()], [20])
    store.check_integrity()
    del store
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_store_takes_positional_arguments_in_the_order_of_the_stub() -> None:
    t = small_lanes()
    planes = (t.key_blocks, t.value_blocks, t.position, t.block_table, t.lane_len, t.seq_len)
    assert _C.KvStore(*planes, None, 8).num_sequences() == 0
    assert _C.KvStore(*planes, head_dim=8).free_blocks() == len(t.key_blocks)


def test_bad_store_tensor_is_named() -> None:
    t = small_lanes()
    good = {
        "key_blocks": t.key_blocks,
        "value_blocks": t.value_blocks,
        "position": t.position,
        "block_table": t.block_table,
        "lane_len": t.lane_len,
        "seq_len": t.seq_len,
        "query_ring": t.query_ring,
    }
    for name in good:
        with pytest.raises(ValueError, match=f"^{name}: "):
            _C.KvStore(**{**good, name: torch.ones(3, dtype=torch.float64)}, head_dim=8)
        with pytest.raises(TypeError, match=f"^{name}: expected torch.Tensor, got int"):
            _C.KvStore(**{**good, name: 3}, head_dim=8)
    with pytest.raises(ValueError, match="head_dim"):
        _C.KvStore(**good, head_dim=7)


def test_store_counts_and_lives() -> None:
    lanes = small_lanes()
    store, seq = lanes.store, lanes.seq
    total = store.free_blocks()
    assert store.blocks_to_extend([seq], [17]) == 4  # two blocks for each of two heads
    store.extend(seqs=[seq], counts=(17,))
    assert store.free_blocks() == total - 4 == total - store.num_blocks(seq)
    assert (store.seq_len(seq), store.max_lane_len(seq), store.total_slots(seq)) == (17, 17, 34)
    store.truncate(seq, 1)
    assert store.seq_len(seq) == 16
    store.extend([seq], [1])
    assert store.blocks_to_fork(seq, 1, True) == 4
    (child,) = store.fork(seq, 1, copy=False)
    assert store.rows([seq, child]) == [store.row(seq), store.row(child)]
    assert store.free_rows() == 0 and store.num_sequences() == 2
    store.adopt(parent=seq, child=child)
    assert store.is_live(seq) and not store.is_live(child)
    store.release(seq)
    assert store.free_blocks() == total and not store.is_live(seq)
    with pytest.raises(ValueError, match="seq"):
        store.row(seq)
    store.check_integrity()


def test_out_of_blocks_is_a_runtime_error_and_changes_nothing() -> None:
    assert issubclass(_C.OutOfBlocks, RuntimeError)
    assert issubclass(_C.InternalError, RuntimeError)
    assert not issubclass(_C.OutOfBlocks, ValueError)
    lanes = small_lanes(rows=3, max_slots=32, blocks=4)  # for one full sequence
    store = lanes.store
    store.extend([lanes.seq], [32])
    other = store.create()
    before = store.free_blocks()
    with pytest.raises(_C.OutOfBlocks, match=r"\d"):
        store.extend([other], [1])
    assert store.free_blocks() == before and store.seq_len(other) == 0
    with pytest.raises(_C.OutOfBlocks):
        store.fork(lanes.seq, 1, True)
    store.create()
    with pytest.raises(_C.OutOfBlocks):
        store.create()
    store.check_integrity()


def test_fill_batch_names_rows_offsets_and_positions() -> None:
    lanes = small_lanes()
    store, first = lanes.store, lanes.seq
    second = store.create()
    store.extend([first, second], [5, 2])
    store.extend([second, first], [1, 2])
    rows, cu = torch.empty(2, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
    positions = torch.empty(3, dtype=torch.int64)
    store.fill_batch([second, first], [1, 2], rows, cu, positions)
    assert rows.tolist() == store.rows([second, first])
    assert cu.tolist() == [0, 1, 3]
    assert positions.tolist() == [2, 5, 6]
    with pytest.raises(ValueError, match="cu_tokens"):
        store.fill_batch([second, first], [1, 2], rows, rows, positions)


# ---- operations: every argument arrives where it belongs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_append_and_attend_equal_torch(way: bool, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(11)
    lanes = small_lanes(dtype=dtype, max_slots=96)
    tokens, scale = 37, 0.3
    query = torch.randn((tokens, 4, 8), generator=g).to(dtype)
    key = torch.randn((tokens, 2, 8), generator=g).to(dtype)
    value = torch.randn((2, tokens, 8), generator=g).to(dtype).transpose(0, 1)  # strided
    rows, cu_tokens, _ = lanes.extend(tokens)
    store = lanes.store
    _C.append_kv(store, 0, key, value, query, rows, cu_tokens, stream=0)
    out, lse = torch.full_like(query, torch.nan), torch.full((tokens, 4), torch.nan)
    scratch = torch.empty(_C.attend_scratch_bytes(store), dtype=torch.uint8)
    _C.attend(store, 0, query, out, lse, scratch, rows, cu_tokens, scale=scale)

    q, k, v = query.double(), key.double(), value.double()
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    logit = torch.einsum("thd,shd->hts", q, k) * scale
    logit += torch.full((tokens, tokens), -torch.inf).triu(1)
    want = torch.einsum("hts,shd->thd", logit.softmax(-1), v)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2  # bf16 rounds the result to 8 bits
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), logit.logsumexp(-1).T, atol=1e-4, rtol=1e-5)

    again = torch.full_like(query, torch.nan)
    _C.attend(store, 0, query, again, None, scratch, rows, cu_tokens, scale)
    assert torch.equal(again, out)


def test_query_is_none_exactly_without_a_ring() -> None:
    lanes = small_lanes(window=0)
    key = torch.ones(3, 2, 8)
    lanes.append(key, key, None)
    with pytest.raises(ValueError, match="query"):
        lanes.append(key, key, torch.ones(3, 4, 8))
    ringed = small_lanes()
    with pytest.raises(ValueError, match="query"):
        ringed.append(key, key, None)


def test_operations_name_the_wrong_argument() -> None:
    lanes = small_lanes()
    rows, cu_tokens, _ = lanes.extend(3)
    key, query = torch.ones(3, 2, 8), torch.ones(3, 4, 8)
    good = {"key": key, "value": key, "query": query, "rows": rows, "cu_tokens": cu_tokens}
    for name in good:
        with pytest.raises(ValueError, match=f"^{name}: "):
            _C.append_kv(lanes.store, 0, **{**good, name: torch.ones(2, 2, dtype=torch.float64)})
        with pytest.raises(TypeError, match=f"^{name}: expected torch.Tensor, got str"):
            _C.append_kv(lanes.store, 0, **{**good, name: "x"})
    with pytest.raises(ValueError, match="layer"):
        _C.append_kv(lanes.store, 1, **good)
    with pytest.raises(TypeError, match="store"):
        _C.append_kv(None, 0, **good)


def test_random_scores_follow_seed_and_protect() -> None:
    lanes = small_lanes()
    key = torch.ones(20, 2, 8)
    lanes.append(key, key, torch.ones(20, 4, 8))

    def score(seed: int, protect: int) -> torch.Tensor:
        out = torch.full((1, 1, 2, 24), torch.nan)
        _C.score_random(lanes.store, lanes.rows(), out, seed=seed, protect=protect)
        return out[0, 0]

    first = score(2**63 + 5, 3)
    assert torch.all(first[:, 17:20] == torch.inf) and torch.all(first[:, 20:] == -torch.inf)
    assert torch.all((first[:, :17] >= 0) & (first[:, :17] < 1))
    assert torch.equal(first, score(2**63 + 5, 3))
    assert not torch.equal(first[:, :17], score(6, 3)[:, :17])
    with pytest.raises(TypeError):
        score(-1, 3)


def test_key_scores_take_their_kind_and_protect() -> None:
    lanes = small_lanes()
    key = torch.arange(1.0, 21).view(20, 1, 1).expand(20, 2, 8).contiguous()
    lanes.append(key, key, torch.ones(20, 4, 8))

    def score(kind: int, protect: int) -> torch.Tensor:
        out = torch.full((1, 1, 2, 24), torch.nan)
        _C.score_keys(lanes.store, lanes.rows(), out, kind=kind, protect=protect)
        return out[0, 0]

    norms = -torch.arange(1.0, 21) * 8**0.5
    for kind, want in [(0, norms), (1, -torch.ones(20))]:
        got = score(kind, 3)
        torch.testing.assert_close(got[:, :17], want[:17].expand(2, 17), atol=0, rtol=1e-5)
        assert torch.all(got[:, 17:20] == torch.inf) and torch.all(got[:, 20:] == -torch.inf)
    with pytest.raises(ValueError, match=r"^kind: expected 0 \(norm\) or 1 \(difference\), got 2"):
        score(2, 3)
    with pytest.raises(ValueError, match=r"^kind: expected one of norm, difference, got 'sum'"):
        ops.score_keys(lanes.store, lanes.rows(), (1, 2), 20, kind="sum", protect=3)


def test_tova_scores_are_the_attention_of_the_newest_query() -> None:
    g = torch.Generator().manual_seed(6)
    lanes = small_lanes()
    key, query = torch.randn((20, 2, 8), generator=g), torch.randn((20, 4, 8), generator=g)
    lanes.append(key, key, query)
    got = torch.full((1, 1, 2, 24), torch.nan)
    _C.score_tova(lanes.store, lanes.rows(), got, protect=3)
    logits = query[-1].view(2, 2, 8).double() @ key.permute(1, 2, 0).double() / 8**0.5
    want = logits.softmax(-1).mean((0, 1))
    torch.testing.assert_close(got[0, 0, :, :17].double(), want[:17].expand(2, 17))
    assert torch.all(got[0, 0, :, 17:20] == torch.inf)
    assert torch.all(got[0, 0, :, 20:] == -torch.inf)


def test_copy_blocks_copies_all_planes() -> None:
    lanes = small_lanes()
    lanes.key_blocks[3], lanes.value_blocks[3], lanes.position[3] = 1.5, 2.5, 7
    ids = [torch.tensor([i], dtype=torch.int32) for i in (3, 5)]
    _C.copy_blocks(lanes.store, src=ids[0], dst=ids[1])
    for plane in (lanes.key_blocks, lanes.value_blocks, lanes.position):
        assert torch.equal(plane[5], plane[3])


def test_sample_tokens_greedy_takes_the_best_below_vocab(way: bool) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 9.0], [2.0, 1.0, 0.0, 9.0]])
    vocab = 3
    token, entropy = torch.empty(2, dtype=torch.int64), torch.empty(2)
    logprob = torch.empty(2)
    scratch = torch.empty(_C.sample_tokens_scratch_bytes(columns=4), dtype=torch.uint8)
    _C.sample_tokens(
        logits=logits,
        temperature=torch.zeros(2),
        top_k=torch.zeros(2, dtype=torch.int32),
        top_p=torch.ones(2),
        rng_key=torch.zeros(2, dtype=torch.int64),
        rng_counter=torch.zeros(2, dtype=torch.int64),
        token=token,
        entropy=entropy,
        logprob=logprob,
        scratch=scratch,
        vocab=vocab,
    )
    p = logits[:, :vocab].double().softmax(-1)
    assert token.tolist() == [1, 0]
    torch.testing.assert_close(entropy.double(), -(p * p.log()).sum(-1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(logprob.double(), p.max(-1).values.log(), atol=1e-6, rtol=1e-5)


def test_hash_key_is_splitmix64() -> None:
    def finalise(z: int) -> int:
        mask = 2**64 - 1
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    for key, word in [(0, 0), (1, 2), (2**64 - 1, 2**64 - 1), (0x0123456789ABCDEF, 77)]:
        want = finalise((key + 0x9E3779B97F4A7C15 * (word + 1)) % 2**64)
        assert _C.hash_key(key=key, word=word) == want
    for bad in (-1, 2**64):
        with pytest.raises(TypeError):
            _C.hash_key(bad, 0)


def test_scores_then_eviction_keep_the_asked_number(way: bool) -> None:
    g = torch.Generator().manual_seed(5)
    lanes = small_lanes()
    key = torch.randn((33, 2, 8), generator=g)
    lanes.append(key, key, torch.randn((33, 4, 8), generator=g))
    scores = lanes.score_rkv(protect=4, mix=0.1)
    assert lanes.evict(scores, 20) == 2 * 13
    assert lanes.store.max_lane_len(lanes.seq) == 20
    with pytest.raises(ValueError, match="kernel"):
        lanes.score_rkv(protect=4, mix=0.1, kernel=4)


def test_no_public_function_lacks_named_parameters() -> None:
    for name, member in vars(_C).items():
        if inspect.isbuiltin(member):
            assert "arg0" not in (member.__doc__ or ""), name
