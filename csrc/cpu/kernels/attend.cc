// Attention of one tile of query rows over one lane, for fp32, bf16 and fp16 storage.
//
// Chunks of kChunk slots with a running maximum and sum per row. Up to eight rows at a time stay in
// registers: q.k of rows x slots with slots along vector lanes (one load of K serves all rows),
// then out of rows x dims with dims along vector lanes (one load of V serves all rows). A short
// cache is bound by multiply-adds, a long one by reading K and V once. Every kAttendSplit slots the
// row starts afresh, and what it had is put together with what follows.
//
// Maxima lose NaN, weights of 0 lose infinite logits: so sums take up 0 times every logit, which is
// NaN unless the logit is finite.
//
// The arithmetic of a row never depends on the rows that share its tile or on how many there are:
// a token's result is the same bits alone, in a batch and in a chunk of a prompt.
#include "cpu/kernels/observers.h"

namespace kvcore {
namespace KV_ISA_NAMESPACE {
namespace {

constexpr int kChunkBlocks = kChunk / kBlock;
constexpr int kRowBlock = 8;

// Turns the scores of slots [0, n) of one row into weights exp(scale * s - max), keeps the running
// maximum and sum, and returns the factor that rescales what was accumulated before.
KV_INLINE float SoftmaxRow(float* s, int64_t n, float scale, float& max, float& sum) {
  using F = VecF<kWidth>;
  const F minus_inf = Splat<kWidth>(-__builtin_inff());
  F top = minus_inf, zero = {};
  int64_t j = 0;
  for (; j + kWidth <= n; j += kWidth) {
    const F x = Load<F>(s + j) * scale;
    Store(s + j, x);
    zero += x * 0.0f;
    top = Max<kWidth>(x, top);
  }
  if (j < n) {  // what lies past n may be anything
    const F x = Load<F>(s + j) * scale;
    const F live = Iota<kWidth>() < static_cast<int32_t>(n - j) ? x : minus_inf;
    Store(s + j, live);
    zero += (Iota<kWidth>() < static_cast<int32_t>(n - j) ? x : F{}) * 0.0f;
    top = Max<kWidth>(live, top);
  }
  const float new_max = MaxLanes<kWidth>(top) > max ? MaxLanes<kWidth>(top) : max;
  F total = {};
  for (j = 0; j < n; j += kWidth) {
    const F w = ExpBelow80<kWidth>(Load<F>(s + j) - new_max);
    Store(s + j, w);
    total += w;
  }
  const float rescale = ExpBelow80<4>(Splat<4>(max - new_max))[0];
  sum = sum * rescale + SumLanes<kWidth>(total + zero);
  max = new_max;
  return rescale;
}

// out[r][dims] = rescale[r] * out[r][dims] + sum over slots [begin, end) of w[r][slot] * v[slot],
// for ND spans of 2W dims from dim d on. What lies at `ahead` is fetched for later on the way, as
// many elements per block as are read.
template <int R, int ND, int W, typename T>
KV_INLINE void AddValues(const float* w, const T* const* value, const T* const* ahead,
                         int64_t begin, int64_t end, int64_t d, int64_t head_dim,
                         const float* rescale, float* out, int64_t out_stride) {
  using F = VecF<W>;
  constexpr int kDims = 2 * W * ND;
  out += d;
  F acc[R][2 * ND];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * ND; ++i) acc[r][i] = Load<F>(out + r * out_stride + i * W) * rescale[r];
  }
  for (int64_t j = begin; j < end;) {
    const int64_t block_end = (j / kBlock + 1) * kBlock, stop = block_end < end ? block_end : end;
    const T* v = value[j / kBlock] + (j % kBlock) * head_dim + d;
    const T* next = ahead[j / kBlock] + (j % kBlock) * kDims + kBlock * d;
    for (; j < stop; ++j, v += head_dim, next += kDims) {
      Prefetch<kDims>(next);
      F x[2 * ND];
#pragma GCC unroll 8
      for (int i = 0; i < ND; ++i) LoadSpan<W>(v + i * 2 * W, x[2 * i], x[2 * i + 1]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F weight = Splat<W>(w[r * kScoreStride + j]);
#pragma GCC unroll 8
        for (int i = 0; i < 2 * ND; ++i) acc[r][i] += x[i] * weight;
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * ND; ++i) Store(out + r * out_stride + i * W, acc[r][i]);
  }
}

template <int R, typename T>
KV_INLINE void AddAllDims(const float* w, const T* const* value, const T* const* ahead,
                          int64_t begin, int64_t end, int64_t head_dim, const float* rescale,
                          float* out, int64_t out_stride) {
  constexpr int kSpans = R >= 4 ? 1 : R >= 2 ? 2 : 4;
  int64_t d = 0;
  for (; d + kSpans * 2 * kWidth <= head_dim; d += kSpans * 2 * kWidth)
    AddValues<R, kSpans, kWidth>(w, value, ahead, begin, end, d, head_dim, rescale, out,
                                 out_stride);
  if constexpr (kSpans > 1)
    for (; d + 2 * kWidth <= head_dim; d += 2 * kWidth)
      AddValues<R, 1, kWidth>(w, value, ahead, begin, end, d, head_dim, rescale, out, out_stride);
  if constexpr (kWidth > 8)
    if (d + 16 <= head_dim) {
      AddValues<R, 1, 8>(w, value, ahead, begin, end, d, head_dim, rescale, out, out_stride);
      d += 16;
    }
  if constexpr (kWidth > 4)
    if (d < head_dim)
      AddValues<R, 1, 4>(w, value, ahead, begin, end, d, head_dim, rescale, out, out_stride);
}

// Products of R rows, the last kExtra of which are an observer's, with a chunk's first num_slots
// slots.
template <typename T>
using ScoreFn = void (*)(const float* q, const T* const* key, const T* const* value,
                         int64_t num_slots, int64_t head_dim, float* s);
template <int R, int kExtra, typename T>
__attribute__((noinline)) void Score(const float* q, const T* const* key, const T* const* value,
                                     int64_t num_slots, int64_t head_dim, float* s) {
  ScoreChunk<R, kExtra>(q, key, value, num_slots, head_dim, s);
}
// By number of the model's rows.
template <int kExtra, typename T>
constexpr ScoreFn<T> kScore[kRowBlock] = {
    Score<1 + kExtra, kExtra, T>, Score<2 + kExtra, kExtra, T>, Score<3 + kExtra, kExtra, T>,
    Score<4 + kExtra, kExtra, T>, Score<5 + kExtra, kExtra, T>, Score<6 + kExtra, kExtra, T>,
    Score<7 + kExtra, kExtra, T>, Score<8 + kExtra, kExtra, T>};

// A row block's scores `s` become weights, and values are added. Row r sees `seen[r]` slots of the
// chunk, seen ascends. State (max, sum, out) is updated. `ahead` = keys wanted next.
template <typename T>
using WeighFn = void (*)(float* s, const T* const* value, const T* const* ahead,
                         const int64_t* seen, int64_t head_dim, float scale, float* max, float* sum,
                         float* rescale, float* out, int64_t out_stride);
template <int R, typename T>
__attribute__((noinline)) void Weigh(float* s, const T* const* value, const T* const* ahead,
                                     const int64_t* seen, int64_t head_dim, float scale, float* max,
                                     float* sum, float* rescale, float* out, int64_t out_stride) {
  for (int r = 0; r < R; ++r)
    rescale[r] =
        seen[r] > 0 ? SoftmaxRow(s + r * kScoreStride, seen[r], scale, max[r], sum[r]) : 1.0f;
  // All rows share the slots that all of them see; the few that only later tokens see are added
  // row by row, so that nothing of them, not even 0 * inf, reaches an earlier token.
  const int64_t shared = seen[0];
  constexpr int kAtOnce = kWidth == 16 ? R : R <= 4 ? R : (R + 1) / 2;
  AddAllDims<kAtOnce>(s, value, ahead, 0, shared, head_dim, rescale, out, out_stride);
  if constexpr (kAtOnce < R)
    AddAllDims<R - kAtOnce>(s + kAtOnce * kScoreStride, value, ahead, 0, shared, head_dim,
                            rescale + kAtOnce, out + kAtOnce * out_stride, out_stride);
  const float one = 1.0f;
  for (int r = 0; r < R; ++r)
    if (seen[r] > shared)
      AddAllDims<1>(s + r * kScoreStride, value, ahead, shared, seen[r], head_dim, &one,
                    out + r * out_stride, out_stride);
}

template <int W, typename T>
KV_INLINE void StoreScaled(const float* x, float factor, T* out) {
  StoreSpan<W>(out, Load<VecF<W>>(x) * factor, Load<VecF<W>>(x + W) * factor);
}

// The softmax of some rows over some slots, not yet divided by its sum.
struct State {
  float* out;  // [rows][head_dim + 16]
  float *max, *sum;

  // In AttendStateFloats(rows, head_dim) floats.
  KV_INLINE State(float* at, int64_t rows, int64_t head_dim)
      : out(at), max(at + rows * (head_dim + 16)), sum(max + rows) {}
};

void Clear(const State& state, int64_t rows, int64_t head_dim) {
  for (int64_t i = 0; i < rows * (head_dim + 16); ++i) state.out[i] = 0.0f;
  for (int64_t r = 0; r < rows; ++r) {
    state.max[r] = -__builtin_inff();
    state.sum[r] = 0.0f;
  }
}

// Adds the slots of `next`, which come after those of `state`. One function, so that whoever adds
// rounds alike.
__attribute__((noinline)) void Merge(const State& next, int64_t rows, int64_t head_dim,
                                     const State& state) {
  using F = VecF<kWidth>;
  for (int64_t r = 0; r < rows; ++r) {
    if (next.sum[r] == 0.0f) continue;  // the row saw none of them
    const float top = next.max[r] > state.max[r] ? next.max[r] : state.max[r];
    const float before = ExpBelow80<4>(Splat<4>(state.max[r] - top))[0];
    const float after = ExpBelow80<4>(Splat<4>(next.max[r] - top))[0];
    state.max[r] = top;
    state.sum[r] = state.sum[r] * before + next.sum[r] * after;
    float* const to = state.out + r * (head_dim + 16);
    const float* const from = next.out + r * (head_dim + 16);
    for (int64_t d = 0; d < head_dim; d += kWidth)
      Store(to + d, Load<F>(to + d) * before + Load<F>(from + d) * after);
  }
}

// Divides by the sums and writes the tile's rows. Rows of which anything is not finite become NaN,
// and so do their sums.
template <typename T>
__attribute__((noinline)) void WriteRows(const AttendTile& t, const State& state) {
  using F = VecF<kWidth>;
  const int64_t head_dim = t.head_dim;
  for (int64_t r = t.num_rows - 1; r >= 0; --r) {
    const int64_t token = (t.first_row + r) / t.group, head = (t.first_row + r) % t.group;
    T* const to = static_cast<T*>(t.out) + token * t.out_token + head * t.out_head;
    const float* const from = state.out + r * (head_dim + 16);
    const float sum = state.sum[r];
    F zero = {};
    for (int64_t d = 0; d < head_dim; d += kWidth) zero += Load<F>(from + d) * 0.0f;
    const float bad = SumLanes<kWidth>(zero) + sum * 0.0f;  // 0 or NaN
    if (!(bad == 0.0f)) *t.bad_row = t.first_row + r;
    const float factor = (sum == 0.0f ? 0.0f : 1.0f / sum) + bad;
    int64_t d = 0;
    for (; d + 2 * kWidth <= head_dim; d += 2 * kWidth)
      StoreScaled<kWidth>(from + d, factor, to + d);
    if constexpr (kWidth > 8)
      if (d + 16 <= head_dim) {
        StoreScaled<8>(from + d, factor, to + d);
        d += 16;
      }
    if constexpr (kWidth > 4)
      if (d < head_dim) StoreScaled<4>(from + d, factor, to + d);
    if (t.lse != nullptr)
      t.lse[token * t.lse_token + head * t.lse_head] =
          sum == 0.0f ? -__builtin_inff() : state.max[r] + __builtin_logf(sum);
    state.sum[r] += bad;
  }
}

// The result of a lane from its splits' parts.
template <typename T>
void MergeSplits(const AttendTile& t) {
  const auto part = [&t](int64_t split) {
    return State(t.partials + split * AttendPartialFloats(t.head_dim), kAttendSharedRows,
                 t.head_dim);
  };
  const State first = part(0);
  for (int64_t split = 1; split < t.num_splits; ++split)
    Merge(part(split), t.num_rows, t.head_dim, first);
  WriteRows<T>(t, first);
}

template <typename T, typename Observer>
void Attend(const AttendTile& t) {
  constexpr int kExtra = Observer::kExtraRows;
  static constexpr WeighFn<T> kWeigh[kRowBlock] = {Weigh<1, T>, Weigh<2, T>, Weigh<3, T>,
                                                   Weigh<4, T>, Weigh<5, T>, Weigh<6, T>,
                                                   Weigh<7, T>, Weigh<8, T>};
  const bool is_part = t.partials != nullptr;
  if (is_part && t.split == t.num_splits) return MergeSplits<T>(t);
  const int64_t head_dim = t.head_dim, out_stride = head_dim + 16;
  float* const q = t.scratch;
  float* const s = q + (kAttendTileRows + kAttendExtraRows) * kQueryStride;
  float* const rescale = s + (kRowBlock + kAttendExtraRows + 1) * kScoreStride;
  float* const states = rescale + kAttendTileRows;
  const State all(states, kAttendTileRows, head_dim);
  const State later(states + AttendStateFloats(kAttendTileRows, head_dim), kAttendTileRows,
                    head_dim);

  // Row blocks of nearly equal size.
  const int rows = static_cast<int>(t.num_rows);
  const int num_blocks = (rows + kRowBlock - 1) / kRowBlock;
  const auto block_begin = [&](int b) { return rows * b / num_blocks; };
  int64_t seen_in_lane[kAttendTileRows];
  for (int r = 0; r < rows; ++r) {
    const int64_t token = (t.first_row + r) / t.group, head = (t.first_row + r) % t.group;
    seen_in_lane[r] = t.limit + token;
    KeyDot<T>::PackQuery(
        static_cast<const T*>(t.query) + token * t.query_token + head * t.query_head, head_dim,
        q + r * kQueryStride);
  }
  Observer observer(t);
  observer.template PackExtra<T>(q + rows * kQueryStride);

  const int64_t longest = t.limit + (t.first_row + rows - 1) / t.group;
  const int64_t first = is_part ? t.split * kAttendSplit : 0;
  const int64_t last = is_part && first + kAttendSplit < longest ? first + kAttendSplit : longest;
  State now = is_part ? State(t.partials + t.split * AttendPartialFloats(head_dim),
                              kAttendSharedRows, head_dim)
                      : all;
  Clear(now, rows, head_dim);
  for (int64_t start = first; start < last; start += kChunk) {
    if (start > first && start % kAttendSplit == 0) {
      if (start > kAttendSplit) Merge(later, rows, head_dim, all);
      now = later;
      Clear(now, rows, head_dim);
    }
    const int64_t slots = last - start < kChunk ? last - start : kChunk;
    const T* key[kChunkBlocks];
    const T* value[kChunkBlocks];
    const T* ahead[kChunkBlocks];
    for (int64_t b = 0; b * kBlock < slots; ++b) {
      const int64_t i = start / kBlock + b, block_elements = kBlock * head_dim;
      key[b] = static_cast<const T*>(t.key_blocks) + t.table[i] * block_elements;
      value[b] = static_cast<const T*>(t.value_blocks) + t.table[i] * block_elements;
      // Keys of the next chunk, then of the next tile, then none: again what is at hand.
      const int64_t j = i + kChunkBlocks;
      ahead[b] = j * kBlock < longest
                     ? static_cast<const T*>(t.key_blocks) + t.table[j] * block_elements
                 : b < t.next_blocks
                     ? static_cast<const T*>(t.key_blocks) + t.next_table[b] * block_elements
                     : key[b];
    }
    for (int b = 0; b < num_blocks; ++b) {
      const int begin = block_begin(b), size = block_begin(b + 1) - begin;
      int64_t seen[kRowBlock];
      for (int r = 0; r < size; ++r) {
        const int64_t n = seen_in_lane[begin + r] - start;
        seen[r] = n < 0 ? 0 : n < slots ? n : slots;
      }
      const int64_t visible = seen[size - 1];
      if (visible == 0) continue;
      // An observer's rows ride with the last block.
      const auto score = b + 1 == num_blocks ? kScore<kExtra, T> : kScore<0, T>;
      score[size - 1](q + begin * kQueryStride, key, value, visible, head_dim, s);
      observer.See(s, begin, size, start, visible);
      kWeigh[size - 1](s, value, ahead, seen, head_dim, t.scale, now.max + begin, now.sum + begin,
                       rescale, now.out + begin * out_stride, out_stride);
    }
  }
  if (is_part) return;
  if (last > kAttendSplit) Merge(later, rows, head_dim, all);
  WriteRows<T>(t, all);
  observer.template Finish<T>(all.max, all.sum);
}

template <typename Observer>
constexpr AttendKernelsOfTypes kOfTypes = {Attend<float, Observer>, Attend<Bf16, Observer>,
                                           Attend<F16, Observer>};

void Exp(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kWidth)
    Store(y + i, ExpBelow80<kWidth>(Load<VecF<kWidth>>(x + i)));
}

}  // namespace

extern const AttendKernels kAttendKernels = {kOfTypes<NoObserver>, kOfTypes<RkvObserver<true>>,
                                             kOfTypes<RkvObserver<false>>, kOfTypes<StatsObserver>,
                                             Exp};

}  // namespace KV_ISA_NAMESPACE
}  // namespace kvcore
