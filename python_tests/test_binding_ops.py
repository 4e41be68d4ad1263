"""Operations through the extension: every argument arrives where it belongs, errors name it."""

import inspect

import pytest
import torch
from support.lanes import small_lanes

from kvcore import ops
from kvcore.native import _C


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
        min_p=torch.zeros(2),
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
