// Products of a few rows with one panel of packed weights. Rows go in blocks that fill the vector
// registers, inputs in blocks that stay in the first-level cache while all rows pass over them.
// Bound by reading the weights up to some ten rows, by multiply-adds beyond.
#include "cpu/kernels/vec_wide.h"
#include "cpu/linear_kernels.h"

namespace kvcore {
namespace KV_ISA_NAMESPACE {
namespace {

constexpr int kVecs = static_cast<int>(kLinearPanel) / kWidth;  // registers of one row
constexpr int kRows = kWidth == 16 ? 12 : kWidth == 8 ? 6 : 2;  // rows that fit the registers
constexpr int64_t kTileRows = 96;                               // rows whose sums are on the stack
constexpr int64_t kInputs = 256;                                // inputs of a block

KV_INLINE F LoadWeights(const float* w) { return Load<F>(w); }
KV_INLINE F LoadWeights(const Bf16* w) {
  return (F)(__builtin_convertvector(Load<VecH<kWidth>>(w), U) << 16);
}

// Memory that is asked for while a block of rows is computed: a line every `step` bytes.
struct Prefetch {
  const char* next;
  int64_t step;
};

// sum[r, 0..16) += x[r, 0..inputs) . weight[0..inputs, 0..16) for R rows.
template <int R, typename T>
void AddProducts(const float* x, int64_t x_stride, const T* weight, int64_t inputs,
                 Prefetch prefetch, float* sum) {
  F acc[R][kVecs];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVecs; ++v) acc[r][v] = Load<F>(sum + r * kLinearPanel + v * kWidth);
  for (int64_t k = 0; k < inputs; ++k) {
    __builtin_prefetch(prefetch.next);
    prefetch.next += prefetch.step;
    F column[kVecs];
    for (int v = 0; v < kVecs; ++v) column[v] = LoadWeights(weight + k * kLinearPanel + v * kWidth);
    for (int r = 0; r < R; ++r) {
      const F value = Splat<kWidth>(x[r * x_stride + k]);
      for (int v = 0; v < kVecs; ++v) acc[r][v] += value * column[v];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVecs; ++v) Store(sum + r * kLinearPanel + v * kWidth, acc[r][v]);
}

template <int R, typename T>
KV_INLINE void AddRows(int rows, const float* x, int64_t x_stride, const T* weight, int64_t inputs,
                       Prefetch prefetch, float* sum) {
  if (rows == R)
    AddProducts<R>(x, x_stride, weight, inputs, prefetch, sum);
  else if constexpr (R > 1)
    AddRows<R - 1>(rows, x, x_stride, weight, inputs, prefetch, sum);
}

// Adds the products of all rows with one block of inputs; asks for the next one meanwhile.
template <typename T>
void AddBlock(const float* x, int64_t x_stride, const T* weight, const char* next,
              int64_t line_bytes, int64_t rows, int64_t inputs, float* sum) {
  const int64_t blocks = (rows + kRows - 1) / kRows, step = line_bytes / blocks;
  for (int64_t b = 0; b < blocks; ++b) {  // as even as they can be
    const int64_t begin = rows * b / blocks, end = rows * (b + 1) / blocks;
    AddRows<kRows>(static_cast<int>(end - begin), x + begin * x_stride, x_stride, weight, inputs,
                   {next + b * inputs * step, step}, sum + begin * kLinearPanel);
  }
}

// The sums of up to kTileRows rows with one panel.
template <typename T>
void Sums(const float* x, int64_t x_stride, const T* weight, const float* bias, int64_t rows,
          int64_t inputs, float* sum) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < kLinearPanel; ++j)
      sum[r * kLinearPanel + j] = bias == nullptr ? 0.0f : bias[j];
  constexpr int64_t line = kLinearPanel * static_cast<int64_t>(sizeof(T));
  for (int64_t k = 0; k < inputs; k += kInputs) {
    const int64_t count = inputs - k < kInputs ? inputs - k : kInputs;
    const T* block = weight + k * kLinearPanel;
    const char* next = reinterpret_cast<const char*>(block + count * kLinearPanel);
    if constexpr (!kSame<T, float>) {
      if (rows > 2 * kRows) {  // widened once for all
        float wide[kInputs * kLinearPanel];
        for (int64_t i = 0; i < count * kLinearPanel; i += kWidth)
          Store(wide + i, LoadWeights(block + i));
        AddBlock(x + k, x_stride, wide, next, line, rows, count, sum);
        continue;
      }
    }
    AddBlock(x + k, x_stride, block, next, line, rows, count, sum);
  }
}

// sum = silu(sum) * up
KV_INLINE void Gate(float* sum, const float* up, int64_t count) {
  for (int64_t i = 0; i < count; i += kWidth) {
    const F z = Load<F>(sum + i), magnitude = z < 0.0f ? z : -z;
    // e^-|z| never overflows; 1 / (1 + e^-z) is e^z / (1 + e^z) for negative z.
    const F e = ExpBelow80<kWidth>(magnitude), numerator = z < 0.0f ? z * e : z;
    Store(sum + i, numerator / (1.0f + e) * Load<F>(up + i));
  }
}

template <typename T>
void Panel(const LinearPanelArgs& a) {
  float sum[kTileRows * kLinearPanel], up[kTileRows * kLinearPanel];
  const T* weight = static_cast<const T*>(a.weight);
  for (int64_t first = 0; first < a.rows; first += kTileRows) {
    const int64_t rows = a.rows - first < kTileRows ? a.rows - first : kTileRows;
    const float* x = a.x + first * a.x_stride;
    Sums(x, a.x_stride, weight, a.bias, rows, a.inputs, sum);
    if (a.gated) {
      Sums(x, a.x_stride, weight + a.inputs * kLinearPanel,
           a.bias == nullptr ? nullptr : a.bias + kLinearPanel, rows, a.inputs, up);
      Gate(sum, up, rows * kLinearPanel);
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* out = a.out + (first + r) * a.out_stride;
      for (int64_t j = 0; j < a.columns; ++j) out[j] = sum[r * kLinearPanel + j];
    }
  }
}

void PanelOfType(const LinearPanelArgs& args) {
  args.is_bf16 ? Panel<Bf16>(args) : Panel<float>(args);
}

}  // namespace

extern const LinearKernels kLinearKernels;
constexpr LinearKernels kLinearKernels = {PanelOfType};

}  // namespace KV_ISA_NAMESPACE
}  // namespace kvcore
