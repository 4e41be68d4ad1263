// Products of a few rows with packed weights. Rows go in blocks and panels side by side so that the
// sums fill the vector registers; inputs go in blocks that stay in the first-level cache while all
// rows pass over them. Bound by reading the weights up to some ten rows, by multiply-adds beyond.
#include "cpu/kernels/vec_wide.h"
#include "cpu/linear_kernels.h"

namespace kvcore {
namespace KV_ISA_NAMESPACE {
namespace {

constexpr int kVecs = static_cast<int>(kLinearPanel) / kWidth;  // registers of a row of one panel
constexpr int kRows = kWidth == 16 ? 12 : kWidth == 8 ? 6 : 2;  // rows whose sums fit the registers
constexpr int64_t kTileRows = 96;                               // rows whose sums are on the stack
constexpr int64_t kInputs = 128;                                // inputs of a block
constexpr int64_t kWidenRows = 2 * kRows;         // more rows than these widen a block once for all
constexpr int64_t kSumStride = 2 * kLinearPanel;  // panels go in pairs, each with its half of a row

KV_INLINE F LoadWeights(const float* w) { return Load<F>(w); }
KV_INLINE F LoadWeights(const Bf16* w) {
#if defined(__AVX512F__)
  // The generic conversion is split in halves; the plain intrinsic warns of an uninitialised value.
  return (F)((U)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)Load<VecH<kWidth>>(w)) << 16);
#else
  return (F)(__builtin_convertvector(Load<VecH<kWidth>>(w), U) << 16);
#endif
}

// One block of inputs of P panels that lie `panel_stride` elements apart.
template <typename T>
struct Block {
  const T* weight;
  int64_t panel_stride, inputs;
};

// Memory that is asked for while a block of rows is computed: of each panel, `step` bytes an input.
struct Prefetch {
  const char* next;
  int64_t panel_bytes, step;
};

// sum[r, 0..16 P) += x[r, 0..inputs) . block[0..inputs, 0..16 P) for R rows.
template <int R, int P, typename T>
void AddProducts(const float* x, int64_t x_stride, Block<T> block, Prefetch prefetch, float* sum) {
  constexpr int kLoads = P * kVecs;
  F acc[R][kLoads];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kLoads; ++v) acc[r][v] = Load<F>(sum + r * kSumStride + v * kWidth);
  for (int64_t k = 0; k < block.inputs; ++k) {
    F column[kLoads];
    for (int p = 0; p < P; ++p) {
      __builtin_prefetch(prefetch.next + p * prefetch.panel_bytes);
      const T* weight = block.weight + p * block.panel_stride + k * kLinearPanel;
      for (int v = 0; v < kVecs; ++v) column[p * kVecs + v] = LoadWeights(weight + v * kWidth);
    }
    prefetch.next += prefetch.step;
    for (int r = 0; r < R; ++r) {
      const F value = Splat<kWidth>(x[r * x_stride + k]);
      for (int v = 0; v < kLoads; ++v) acc[r][v] += value * column[v];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kLoads; ++v) Store(sum + r * kSumStride + v * kWidth, acc[r][v]);
}

template <int R, int P, typename T>
KV_INLINE void AddRows(int rows, const float* x, int64_t x_stride, Block<T> block,
                       Prefetch prefetch, float* sum) {
  if (rows == R)
    AddProducts<R, P>(x, x_stride, block, prefetch, sum);
  else if constexpr (R > 1)
    AddRows<R - 1, P>(rows, x, x_stride, block, prefetch, sum);
}

// Adds the products of all rows with one block of inputs; asks for what follows meanwhile.
template <int P, typename T>
void AddBlock(const float* x, int64_t x_stride, Block<T> block, Prefetch next, int64_t rows,
              float* sum) {
  const int64_t blocks = (rows + kRows - 1) / kRows;
  next.step /= blocks;
  for (int64_t b = 0; b < blocks; ++b) {  // as even as they can be
    const int64_t begin = rows * b / blocks, end = rows * (b + 1) / blocks;
    AddRows<kRows, P>(static_cast<int>(end - begin), x + begin * x_stride, x_stride, block, next,
                      sum + begin * kSumStride);
    next.next += block.inputs * next.step;
  }
}

// sum[r, 0..16 P) of up to kTileRows rows with P panels that follow each other.
template <int P, typename T>
void Sums(const float* x, int64_t x_stride, const T* weight, const float* bias, int64_t rows,
          int64_t inputs, float* sum) {
  constexpr int64_t kBytes = static_cast<int64_t>(sizeof(T));
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < P * kLinearPanel; ++j)
      sum[r * kSumStride + j] = bias == nullptr ? 0.0f : bias[j];
  const int64_t stride = inputs * kLinearPanel;
  for (int64_t k = 0; k < inputs; k += kInputs) {
    const int64_t count = inputs - k < kInputs ? inputs - k : kInputs;
    const Block<T> block = {weight + k * kLinearPanel, stride, count};
    const Prefetch next = {reinterpret_cast<const char*>(block.weight + count * kLinearPanel),
                           stride * kBytes, kLinearPanel * kBytes};
    if constexpr (!kSame<T, float>) {
      if (rows > kWidenRows) {  // widened once for all
        float wide[P * kInputs * kLinearPanel];
        for (int p = 0; p < P; ++p)
          for (int64_t i = 0; i < count * kLinearPanel; i += kWidth)
            Store(wide + p * kInputs * kLinearPanel + i,
                  LoadWeights(block.weight + p * stride + i));
        AddBlock<P, float>(x + k, x_stride, {wide, kInputs * kLinearPanel, count}, next, rows, sum);
        continue;
      }
    }
    AddBlock<P>(x + k, x_stride, block, next, rows, sum);
  }
}

// gate = silu(gate) * up for one panel of a row.
KV_INLINE void Gate(float* gate, const float* up) {
  for (int64_t i = 0; i < kLinearPanel; i += kWidth) {
    const F z = Load<F>(gate + i), magnitude = z < 0.0f ? z : -z;
    // e^-|z| never overflows; 1 / (1 + e^-z) is e^z / (1 + e^z) for negative z.
    const F e = ExpBelow80<kWidth>(magnitude), numerator = z < 0.0f ? z * e : z;
    Store(gate + i, numerator / (1.0f + e) * Load<F>(up + i));
  }
}

// Both halves of the sums. Side by side where the registers hold them, which needs half the loads
// of x.
template <typename T>
void PairSums(const float* x, int64_t x_stride, const T* weight, const float* bias, int64_t rows,
              int64_t inputs, float* sum) {
  if constexpr (kWidth == 16) {
    Sums<2>(x, x_stride, weight, bias, rows, inputs, sum);
  } else {
    Sums<1>(x, x_stride, weight, bias, rows, inputs, sum);
    Sums<1>(x, x_stride, weight + inputs * kLinearPanel,
            bias == nullptr ? nullptr : bias + kLinearPanel, rows, inputs, sum + kLinearPanel);
  }
}

template <typename T>
void Run(const LinearRunArgs& a) {
  alignas(64) float sum[kTileRows * kSumStride];
  const T* weight = static_cast<const T*>(a.weight);
  const float* bias = a.bias;
  int64_t column = 0;
  for (int64_t panel = 0; panel < a.panels; panel += 2) {
    const bool pair = panel + 1 < a.panels;
    const int64_t width = pair && !a.gated ? 2 * kLinearPanel : kLinearPanel;
    const int64_t columns = a.columns - column < width ? a.columns - column : width;
    for (int64_t first = 0; first < a.rows; first += kTileRows) {
      const int64_t rows = a.rows - first < kTileRows ? a.rows - first : kTileRows;
      const float* x = a.x + first * a.x_stride;
      if (pair)
        PairSums(x, a.x_stride, weight, bias, rows, a.inputs, sum);
      else
        Sums<1>(x, a.x_stride, weight, bias, rows, a.inputs, sum);
      for (int64_t r = 0; r < rows; ++r) {
        float* row = sum + r * kSumStride;
        if (a.gated) Gate(row, row + kLinearPanel);
        float* out = a.out + (first + r) * a.out_stride + column;
        for (int64_t j = 0; j < columns; ++j) out[j] = row[j];
      }
    }
    weight += 2 * a.inputs * kLinearPanel;
    if (bias != nullptr) bias += 2 * kLinearPanel;
    column += width;
  }
}

void RunOfType(const LinearRunArgs& args) { args.is_bf16 ? Run<Bf16>(args) : Run<float>(args); }

}  // namespace

extern const LinearKernels kLinearKernels;
constexpr LinearKernels kLinearKernels = {RunOfType};

}  // namespace KV_ISA_NAMESPACE
}  // namespace kvcore
