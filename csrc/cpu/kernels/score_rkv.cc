// R-KV score of one lane. Keys are gathered once, in position order, into panels of 32 columns
// ([head_dim][32] floats); products are 32 x 32 tiles of a register-blocked kernel.
//
// With u the normalised keys and m their sum, the column means need no n x n matrix:
//   n c_j = u_j . m - |u_j|^2 - sum over rows r with p(r) = j of S[r, p(r)]
// and the matrix only says where p(r), the newest similar entry of row r, is. Each unordered pair
// of panels is visited at most once, newest first for every row, and skipped when all its rows have
// found theirs; most keys are similar to a recent one, so most pairs are. Bound by FMAs when few
// are. Double where it is cheap: norms, m, column means and sums.
#include "cpu/kernels/vec_wide.h"
#include "cpu/score_rkv_kernels.h"
#include "ops/kv_layout.h"

namespace kvcore {
namespace KV_ISA_NAMESPACE {
namespace {

constexpr int kPanel = static_cast<int>(kScorePanel);
constexpr int kVecs = kPanel / kWidth;            // vectors across a panel
constexpr int kTileVecs = kVecs < 2 ? kVecs : 2;  // registers of a micro tile:
constexpr int kTileRows = kWidth == 16 ? 8 : 4;   // kTileRows x kTileVecs
// Key blocks in elements; constants, since an inline function would become a symbol.
constexpr int64_t kPairStride = CpuKeyOffset(0, 2), kSlotStride = CpuKeyOffset(1, 0);

typedef uint32_t LooseU32 __attribute__((aligned(2), may_alias));
typedef uint16_t LooseU16 __attribute__((may_alias));

KV_INLINE int64_t RoundUp(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

typedef ScoreLaneScratch Scratch;

// The low 16 bits of every lane, a bf16 or f16, as float. Exact.
KV_INLINE F Convert(U bits, DType dtype) {
  if (dtype == DType::kBF16) return (F)(bits << 16);
  const U magnitude = bits & 0x7fffu;
  const U normal = (magnitude << 13) + (112u << 23), special = (magnitude << 13) | 0x7f800000u;
  const U subnormal = (U)(__builtin_convertvector((I)magnitude, F) * 0x1p-24f);
  const U wide = magnitude < 0x400u ? subnormal : magnitude >= 0x7c00u ? special : normal;
  return (F)(wide | ((bits & 0x8000u) << 16));
}

// panel[k][l] = key k of the entry in slot order[l], as float; 0 for l >= count.
void GatherKeys(const ScoreLaneArgs& a, const int32_t* order, int64_t count, float* panel) {
  const int64_t size = a.dtype == DType::kF32 ? 4 : 2;
  const char* base[kPanel];
  for (int64_t l = 0; l < kPanel; ++l) {
    const int64_t slot = order[l < count ? l : 0];
    const int64_t block = a.block_table[slot / kBlockSlots];
    base[l] = static_cast<const char*>(a.key_blocks) +
              (block * kBlockSlots * a.head_dim + slot % kBlockSlots * kSlotStride) * size;
  }
  for (int64_t k = 0; k < a.head_dim; k += 2) {
    const int64_t offset = k / 2 * kPairStride * size;
    float *even = panel + k * kPanel, *odd = even + kPanel;
    if (a.dtype == DType::kF32) {
      for (int l = 0; l < kPanel; ++l) {
        const float* pair = reinterpret_cast<const float*>(base[l] + offset);
        even[l] = pair[0];
        odd[l] = pair[1];
      }
    } else {
      uint32_t pairs[kPanel];
      for (int l = 0; l < kPanel; ++l)
        pairs[l] = *reinterpret_cast<const LooseU32*>(base[l] + offset);
      for (int l = 0; l < kPanel; l += kWidth) {
        const U two = Load<U>(pairs + l);
        Store(even + l, Convert(two & 0xffffu, a.dtype));
        Store(odd + l, Convert(two >> 16, a.dtype));
      }
    }
  }
  if (count < kPanel)
    for (int64_t k = 0; k < a.head_dim; ++k)
      for (int64_t l = count; l < kPanel; ++l) panel[k * kPanel + l] = 0;
}

void GatherQueries(const ScoreLaneArgs& a, float* panels) {
  const int64_t rows = a.num_queries * a.group;
  for (int64_t first = 0; first < rows; first += kPanel, panels += a.head_dim * kPanel)
    for (int64_t k = 0; k < a.head_dim; ++k) {
      float* to = panels + k * kPanel;
      uint32_t bits[kPanel];
      for (int64_t l = 0; l < kPanel; ++l) {
        const void* query = first + l < rows ? a.queries[first + l] : nullptr;
        if (a.dtype == DType::kF32)
          to[l] = query ? static_cast<const float*>(query)[k] : 0.0f;
        else
          bits[l] = query ? static_cast<const LooseU16*>(query)[k] : 0u;
      }
      if (a.dtype != DType::kF32)
        for (int l = 0; l < kPanel; l += kWidth) Store(to + l, Convert(Load<U>(bits + l), a.dtype));
    }
}

// tile[r][c] = sum over k of a[k][r] b[k][c], for the first `rows` rows (rounded up to kTileRows).
// Every sum runs over k in order, so that the product of two panels is bitwise symmetric.
void MultiplyPanels(const float* a, const float* b, int64_t head_dim, int rows, float* tile) {
  for (int r = 0; r < rows; r += kTileRows)
    for (int c = 0; c < kVecs; c += kTileVecs) {
      F sum[kTileRows][kTileVecs] = {};
      for (int64_t k = 0; k < head_dim; ++k) {
        const float *ak = a + k * kPanel + r, *bk = b + k * kPanel + c * kWidth;
        F column[kTileVecs];
#pragma GCC unroll 8
        for (int v = 0; v < kTileVecs; ++v) column[v] = Load<F>(bk + v * kWidth);
#pragma GCC unroll 8
        for (int i = 0; i < kTileRows; ++i) {
          const F row = Splat<kWidth>(ak[i]);
#pragma GCC unroll 8
          for (int v = 0; v < kTileVecs; ++v) sum[i][v] += row * column[v];
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < kTileRows; ++i)
#pragma GCC unroll 8
        for (int v = 0; v < kTileVecs; ++v)
          Store(tile + (r + i) * kPanel + (c + v) * kWidth, sum[i][v]);
    }
}

// logit[t][c] = max over the group of q . k for the panel's columns, from raw keys. A maximum loses
// NaN: false when any product is not finite.
bool QueryLogits(const ScoreLaneArgs& a, const Scratch& s, int64_t panel_id, int64_t padded) {
  const int64_t rows = a.num_queries * a.group;
  alignas(64) float tile[kPanel * kPanel];
  F zero = {};  // NaN where a product is not finite
  for (int64_t first = 0; first < rows; first += kPanel) {
    const int count = static_cast<int>(rows - first < kPanel ? rows - first : kPanel);
    MultiplyPanels(s.query_panel + first * a.head_dim, s.panels + panel_id * kPanel * a.head_dim,
                   a.head_dim, count, tile);
    for (int r = 0; r < count; ++r) {
      float* to = s.logit + (first + r) / a.group * padded + panel_id * kPanel;
      const bool fresh = (first + r) % a.group == 0;
      for (int c = 0; c < kPanel; c += kWidth) {
        const F x = Load<F>(tile + r * kPanel + c);
        zero += x * 0.0f;
        Store(to + c, fresh ? x : Max<kWidth>(Load<F>(to + c), x));
      }
    }
  }
  return SumLanes<kWidth>(zero) == 0.0f;
}

// Divides the panel's columns by norm + 1e-8 and adds them to key_sum, lane by lane.
void NormalisePanel(const ScoreLaneArgs& a, float* panel, double* key_sum) {
  for (int c = 0; c < kPanel; c += kHalfWidth) {
    D square = {};
    for (int64_t k = 0; k < a.head_dim; ++k) {
      const D x = LoadDouble(panel + k * kPanel + c);
      square += x * x;
    }
    D inverse;
    for (int l = 0; l < kHalfWidth; ++l) inverse[l] = 1.0 / (__builtin_sqrt(square[l]) + 1e-8);
    for (int64_t k = 0; k < a.head_dim; ++k) {
      float* at = panel + k * kPanel + c;
      const H unit = __builtin_convertvector(LoadDouble(at) * inverse, H);
      Store(at, unit);
      D* sum = reinterpret_cast<D*>(key_sum) + k;
      *sum += __builtin_convertvector(unit, D);
    }
  }
}

// x[i] = exp(scale * (x[i] - max x)); returns their sum. REQUIRES: scale > 0, entries from count
// up to the next multiple of kWidth may be overwritten.
double ExpAndSum(float* x, int64_t count, float scale) {
  const int64_t width = RoundUp(count, kWidth);
  for (int64_t i = count; i < width; ++i) x[i] = -kInfinity;
  F top = Splat<kWidth>(-kInfinity);
  for (int64_t i = 0; i < width; i += kWidth) top = Max<kWidth>(top, Load<F>(x + i));
  const F peak = Splat<kWidth>(MaxLanes<kWidth>(top));
  D sum = {};
  for (int64_t i = 0; i < width; i += kWidth) {
    Store(x + i, ExpBelow80<kWidth>((Load<F>(x + i) - peak) * scale));
    sum += LoadDouble(x + i) + LoadDouble(x + i + kHalfWidth);
  }
  return SumLanes(sum);
}

// pooled[i] = max of in over |j - i| <= half, inside the past. Keeps NaN.
void Pool(const float* __restrict in, float* __restrict out, int64_t past, int64_t half) {
  for (int64_t i = 0; i < past; ++i) out[i] = in[i];
  if (half > past - 1) half = past - 1;
  for (int64_t o = 1; o <= half; ++o) {
    for (int64_t i = 0; i < past - o; ++i) out[i] = in[i + o] > out[i] ? in[i + o] : out[i];
    for (int64_t i = o; i < past; ++i) out[i] = in[i - o] > out[i] ? in[i - o] : out[i];
  }
}

// Mean over queries of softmax over the past of scale * logit, max-pooled after the mean
// or, with pool_first, before it. Returns [past], in the scratch.
const float* Importance(const ScoreLaneArgs& a, const Scratch& s, int64_t past, int64_t padded) {
  for (int64_t i = 0; i < padded; ++i) s.importance[i] = 0;
  for (int64_t t = 0; t < a.num_queries; ++t) {
    float* row = s.logit + t * padded;
    const double sum = ExpAndSum(row, past, a.scale);
    const float weight = static_cast<float>(1.0 / (sum * static_cast<double>(a.num_queries)));
    if (a.pool_first) Pool(row, s.pooled, past, a.kernel / 2);
    const float* from = a.pool_first ? s.pooled : row;
    for (int64_t i = 0; i < past; i += kWidth)
      Store(s.importance + i, Load<F>(s.importance + i) + Load<F>(from + i) * weight);
  }
  if (a.pool_first) return s.importance;
  Pool(s.importance, s.pooled, past, a.kernel / 2);
  return s.pooled;
}

// pointer[r] and value[r] for every row. A row of panel J meets the columns of panels above J in
// earlier rounds of the outer loop, newest first, then those of J, J - 1, ..., 0 in its own.
void FindPointers(const ScoreLaneArgs& a, const Scratch& s, int64_t num_panels) {
  const F threshold = Splat<kWidth>(a.threshold);
  alignas(64) float tile[kPanel * kPanel];
  uint32_t hit[kPanel];
  const auto valid = [&a](int64_t panel) {
    const int64_t left = a.len - panel * kPanel;
    return left >= kPanel ? ~0u : (1u << left) - 1u;
  };
  for (int64_t p = 0; p < num_panels; ++p) s.open[p] = valid(p);
  for (int64_t outer = num_panels - 1; outer >= 0; --outer) {
    for (int64_t inner = outer; inner >= 0; --inner) {
      if ((s.open[inner] | s.open[outer]) == 0) continue;
      MultiplyPanels(s.panels + inner * kPanel * a.head_dim, s.panels + outer * kPanel * a.head_dim,
                     a.head_dim, kPanel, tile);
      if (inner == outer)
        for (int r = 0; r < kPanel; ++r) tile[r * kPanel + r] = 0;
      for (int r = 0; r < kPanel; ++r) {
        hit[r] = 0;
        for (int v = 0; v < kVecs; ++v)
          hit[r] |= MaskGreater(Load<F>(tile + r * kPanel + v * kWidth), threshold) << (v * kWidth);
        hit[r] &= valid(outer);
      }
      for (uint32_t rows = s.open[inner]; rows != 0; rows &= rows - 1) {
        const int r = __builtin_ctz(rows);
        if (hit[r] == 0) continue;
        const int c = 31 - __builtin_clz(hit[r]);
        s.pointer[inner * kPanel + r] = static_cast<int32_t>(outer * kPanel + c);
        s.value[inner * kPanel + r] = tile[r * kPanel + c];
        s.open[inner] &= ~(1u << r);
      }
      if (inner == outer) continue;
      for (int r = kPanel - 1; r >= 0; --r)
        for (uint32_t columns = hit[r] & s.open[outer]; columns != 0; columns &= columns - 1) {
          const int c = __builtin_ctz(columns);
          s.pointer[outer * kPanel + c] = static_cast<int32_t>(inner * kPanel + r);
          s.value[outer * kPanel + c] = tile[r * kPanel + c];
          s.open[outer] &= ~(1u << c);
        }
    }
    // Rows without a hit point at the oldest entry; the last tile computed holds its column.
    for (uint32_t rows = s.open[outer]; rows != 0; rows &= rows - 1) {
      const int r = __builtin_ctz(rows);
      s.pointer[outer * kPanel + r] = 0;
      s.value[outer * kPanel + r] = tile[r];
    }
    s.open[outer] = 0;
  }
}

// mean[j] = the column means of S; REQUIRES: pointers are known, key_sum holds m.
void ColumnMeans(const ScoreLaneArgs& a, const Scratch& s, int64_t num_panels) {
  const int64_t padded = num_panels * kPanel;
  for (int64_t j = 0; j < padded; ++j) s.zeroed[j] = 0;
  for (int64_t r = 0; r < a.len; ++r) s.zeroed[s.pointer[r]] += static_cast<double>(s.value[r]);
  const double each = 1.0 / static_cast<double>(a.len);
  for (int64_t j = 0; j < padded; j += kHalfWidth) {
    const float* column = s.panels + j / kPanel * kPanel * a.head_dim + j % kPanel;
    D dot = {}, square = {};
    for (int64_t k = 0; k < a.head_dim; ++k) {
      const D u = LoadDouble(column + k * kPanel);
      dot += u * s.key_sum[k];
      square += u * u;
    }
    for (int l = 0; l < kHalfWidth; ++l)
      s.mean[j + l] = static_cast<float>((dot[l] - square[l] - s.zeroed[j + l]) * each);
  }
}

bool ScoreLane(const ScoreLaneArgs& a) {
  const Scratch& s = a.scratch;
  const int64_t past = a.len - a.protect, padded = RoundUp(a.len, kPanel);
  const int64_t num_panels = padded / kPanel;

  GatherQueries(a, s.query_panel);
  for (int64_t i = 0; i < a.head_dim * kHalfWidth; ++i) s.key_sum[i] = 0;
  for (int64_t p = 0; p < num_panels; ++p) {
    float* panel = s.panels + p * kPanel * a.head_dim;
    const int64_t left = a.len - p * kPanel;
    GatherKeys(a, a.order + p * kPanel, left < kPanel ? left : kPanel, panel);
    if (p * kPanel < past && !QueryLogits(a, s, p, padded)) return false;
    NormalisePanel(a, panel, s.key_sum);
  }
  for (int64_t k = 0; k < a.head_dim; ++k) {
    s.key_sum[k] = SumLanes(reinterpret_cast<const D*>(s.key_sum)[k]);
  }
  const float* importance = Importance(a, s, past, padded);
  FindPointers(a, s, num_panels);
  ColumnMeans(a, s, num_panels);

  const double sum = ExpAndSum(s.mean, a.len, 1.0f);
  const float redundancy = static_cast<float>((1.0 - static_cast<double>(a.mix)) / sum);
  bool finite = sum - sum == 0;
  for (int64_t i = 0; i < past; ++i) {
    const float x = a.mix * importance[i] - s.mean[i] * redundancy;
    finite &= __builtin_isfinite(x);
    a.score[a.order[i]] = x;
  }
  for (int64_t i = past; i < a.len; ++i) a.score[a.order[i]] = kInfinity;
  return finite;
}

}  // namespace

extern const ScoreKernels kScoreKernels;
const ScoreKernels kScoreKernels = {ScoreLane};

}  // namespace KV_ISA_NAMESPACE
}  // namespace kvcore
