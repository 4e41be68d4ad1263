"""The extension's boundary: how tensors come in, how errors come out, who keeps what alive."""

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from support.lanes import small_lanes
from torch._subclasses import FakeTensorMode

from kvcore.native import _C

DTYPES = ["float32", "bfloat16", "float16", "float64", "int32", "int64", "uint8", "bool"]

# Deprecation notices that torch prints when tensors of these kinds are made.
pytestmark = pytest.mark.filterwarnings("ignore:::torch", "ignore::UserWarning")


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
