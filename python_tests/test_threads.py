"""The number of threads may change at any moment: no overrun, and torch's is followed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from support.engine_tools import generate, greedy, make_prompts, small_config
from support.lanes import Lanes
from support.tiny_models import make_model
from test_binding import run_python

from kvcore import ops
from kvcore.engine import Engine
from kvcore.native import _C, follow_torch_threads, set_threads


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    mine, torchs = _C.num_threads(), torch.get_num_threads()
    yield
    torch.set_num_threads(torchs)
    _C.set_num_threads(mine)


def long_lane(tokens: int) -> tuple[Lanes, torch.Tensor, torch.Tensor]:
    lanes = Lanes(kv_heads=4, q_heads=28, head_dim=64, window=0, max_slots=tokens, rows=1)
    g = torch.Generator().manual_seed(1)
    key = torch.randn((tokens, 4, 64), generator=g)
    lanes.append(key, key, None)
    cu = torch.tensor([0, 16], dtype=torch.int32)
    return lanes, torch.randn((16, 28, 64), generator=g), cu


def test_scratch_is_not_overrun_while_another_thread_changes_the_number():
    lanes, query, cu = long_lane(600)
    _C.set_num_threads(2)
    need = _C.attend_scratch_bytes(lanes.store)
    _C.set_num_threads(8)
    buffer = torch.full((_C.attend_scratch_bytes(lanes.store),), 0xAB, dtype=torch.uint8)
    out, want = torch.empty_like(query), torch.empty_like(query)
    _C.attend(lanes.store, 0, query, want, None, buffer, lanes.rows(), cu, 0.1)
    buffer.fill_(0xAB)
    stop = threading.Event()

    def flip() -> None:
        while not stop.is_set():
            _C.set_num_threads(8)
            _C.set_num_threads(2)

    other = threading.Thread(target=flip)
    other.start()
    try:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            _C.attend(lanes.store, 0, query, out, None, buffer[:need], lanes.rows(), cu, 0.1)
            assert torch.equal(out, want)
    finally:
        stop.set()
        other.join()
    assert bool((buffer[need:] == 0xAB).all())


def test_scratch_for_one_thread_is_enough_and_less_is_refused():
    lanes, query, cu = long_lane(100)
    _C.set_num_threads(1)
    need = _C.attend_scratch_bytes(lanes.store)
    _C.set_num_threads(5)
    out = torch.empty_like(query)
    scratch = torch.empty(need, dtype=torch.uint8)
    _C.attend(lanes.store, 0, query, out, None, scratch, lanes.rows(), cu, 0.1)
    with pytest.raises(ValueError, match=rf"^scratch: expected at least {need} bytes .*{need - 1}"):
        _C.attend(lanes.store, 0, query, out, None, scratch[:-1], lanes.rows(), cu, 0.1)


def test_an_output_whose_elements_share_memory_is_refused():
    lanes, query, cu = long_lane(100)
    scratch = ops.attend_scratch(lanes.store)

    def run(out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        _C.attend(lanes.store, 0, query, out, lse, scratch, lanes.rows(), cu, 0.1)

    message = "^out: expected a tensor whose elements share no memory"
    for shape in [(1, 28, 64), (16, 1, 64)]:
        with pytest.raises(ValueError, match=message):
            run(torch.empty(shape).expand(16, 28, 64))
    with pytest.raises(ValueError, match=message):
        run(torch.empty(16 * 28 * 64).as_strided((16, 28, 64), (28 * 63, 63, 1)))
    with pytest.raises(ValueError, match=r"^lse: expected a tensor whose elements share no memory"):
        run(torch.empty_like(query), torch.empty(16, 1).expand(16, 28))
    run(torch.empty(28, 16, 64).transpose(0, 1), torch.empty(28, 16).t())
    run(torch.empty(16, 30, 80)[:, 1:29, 8:72])


def test_the_engine_follows_torch_from_forward_to_forward():
    model, prompts = make_model(), make_prompts([40, 7])
    torch.set_num_threads(1)
    engine = Engine(model, small_config())
    want = generate(engine, prompts, greedy(12))
    assert _C.num_threads() == 1
    for threads in (3, 1, 2):
        torch.set_num_threads(threads)
        assert generate(engine, prompts, greedy(12)) == want  # scratch grows where it has to
        assert _C.num_threads() == threads


def test_a_number_from_the_environment_is_kept():
    program = (
        "import torch; from kvcore.native import _C, follow_torch_threads; "
        "torch.set_num_threads(3); follow_torch_threads(); print(_C.num_threads())"
    )
    assert run_python(program, KVCORE_NUM_THREADS="2") == "2"
    assert run_python(program, KVCORE_NUM_THREADS="") == "3"


def test_torch_and_the_core_get_the_same_number_whatever_the_environment_says():
    for threads in (3, 1, 2):
        set_threads(threads)
        assert (torch.get_num_threads(), _C.num_threads()) == (threads, threads)
    program = (
        "import torch; from kvcore.native import _C, follow_torch_threads, set_threads; "
        "set_threads(3); follow_torch_threads(); print(_C.num_threads(), torch.get_num_threads())"
    )
    assert run_python(program, KVCORE_NUM_THREADS="2") == "3 3"


@pytest.mark.parametrize("bad", [0, -1, 1025, 2.0, True, None, "2"])
def test_a_number_of_threads_that_cannot_be_changes_neither(bad: object):
    set_threads(2)
    with pytest.raises(ValueError, match=r"^threads: expected an integer"):
        set_threads(bad)  # type: ignore[arg-type]
    assert (torch.get_num_threads(), _C.num_threads()) == (2, 2)


def test_following_changes_nothing_where_the_numbers_agree():
    torch.set_num_threads(2)
    follow_torch_threads()
    follow_torch_threads()
    assert _C.num_threads() == 2
