#include "support/owned_tensor.h"

#include <algorithm>
#include <cstring>

namespace kvcore {

OwnedTensor::OwnedTensor(DType dtype, std::initializer_list<int64_t> shape)
    : layout_(MakeView(nullptr, dtype, shape)) {
  bytes_.resize(static_cast<size_t>(layout_.numel() * DTypeBytes(dtype)));
}

OwnedTensor::OwnedTensor(DType dtype, std::initializer_list<int64_t> shape,
                         std::initializer_list<int64_t> stride)
    : layout_(MakeView(nullptr, dtype, shape)) {
  std::copy(stride.begin(), stride.end(), layout_.stride);
  int64_t elements = layout_.numel() > 0 ? 1 : 0;
  for (int i = 0; i < layout_.ndim && elements > 0; ++i)
    elements += (layout_.shape[i] - 1) * layout_.stride[i];
  bytes_.resize(static_cast<size_t>(elements * DTypeBytes(dtype)));
}

OwnedTensor OwnedTensor::I32(const std::vector<int32_t>& values) {
  OwnedTensor t(DType::kI32, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) t.SetAt(static_cast<int64_t>(i), values[i]);
  return t;
}

TensorView OwnedTensor::view() const {
  static uint8_t nothing[64];
  TensorView v = layout_;
  v.data = const_cast<uint8_t*>(bytes_.empty() ? nothing : bytes_.data());
  return v;
}

int64_t OwnedTensor::Offset(std::initializer_list<int64_t> index) const {
  KV_ICHECK(static_cast<int>(index.size()) == layout_.ndim) << index.size() << " indices";
  int64_t offset = 0;
  int i = 0;
  for (int64_t at : index) {
    KV_ICHECK(at >= 0 && at < layout_.shape[i]) << "index " << at << " of dimension " << i;
    offset += at * layout_.stride[i++];
  }
  return offset;
}

double OwnedTensor::Get(std::initializer_list<int64_t> index) const { return At(Offset(index)); }

void OwnedTensor::Set(std::initializer_list<int64_t> index, double value) {
  SetAt(Offset(index), value);
}

double OwnedTensor::At(int64_t offset) const {
  const uint8_t* p = bytes_.data() + offset * DTypeBytes(layout_.dtype);
  const auto load = [p](auto x) {
    std::memcpy(&x, p, sizeof(x));
    return x;
  };
  switch (layout_.dtype) {
    case DType::kF32:
      return load(float{});
    case DType::kBF16:
      return ToFloat(load(BFloat16{}));
    case DType::kF16:
      return ToFloat(load(Half{}));
    case DType::kI32:
      return load(int32_t{});
    case DType::kI64:
      return static_cast<double>(load(int64_t{}));
    case DType::kF64:
      return load(double{});
    case DType::kU8:
    case DType::kBool:
      return *p;
  }
  return 0;
}

void OwnedTensor::SetAt(int64_t offset, double value) {
  uint8_t* p = bytes_.data() + offset * DTypeBytes(layout_.dtype);
  const auto store = [p](auto x) { std::memcpy(p, &x, sizeof(x)); };
  switch (layout_.dtype) {
    case DType::kF32:
      return store(static_cast<float>(value));
    case DType::kBF16:
      return store(FromFloat<BFloat16>(static_cast<float>(value)));
    case DType::kF16:
      return store(FromFloat<Half>(static_cast<float>(value)));
    case DType::kI32:
      return store(static_cast<int32_t>(value));
    case DType::kI64:
      return store(static_cast<int64_t>(value));
    case DType::kF64:
      return store(value);
    case DType::kU8:
    case DType::kBool:
      return store(static_cast<uint8_t>(value));
  }
}

void OwnedTensor::FillNormal(std::mt19937_64& rng, double scale) {
  std::normal_distribution<double> normal(0.0, scale);
  const int64_t n = static_cast<int64_t>(bytes_.size()) / DTypeBytes(layout_.dtype);
  for (int64_t i = 0; i < n; ++i) SetAt(i, normal(rng));
}

void OwnedTensor::Fill(double value) {
  if (bytes_.empty()) return;
  SetAt(0, value);
  const size_t element = static_cast<size_t>(DTypeBytes(layout_.dtype));
  for (size_t done = element; done < bytes_.size(); done *= 2)
    std::memcpy(bytes_.data() + done, bytes_.data(), std::min(done, bytes_.size() - done));
}

bool SameBytes(const OwnedTensor& a, const OwnedTensor& b) { return a.bytes() == b.bytes(); }

}  // namespace kvcore
