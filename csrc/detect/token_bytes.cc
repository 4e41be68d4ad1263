#include "detect/token_bytes.h"

#include <limits>

#include "base/check.h"

namespace kvcore {

TokenBytes::TokenBytes(const std::vector<std::string_view>& bytes) {
  KV_CHECK(bytes.size() <= static_cast<size_t>(std::numeric_limits<int32_t>::max()))
      << "token bytes: expected fewer than 2^31 tokens, got " << bytes.size();
  size_t total = 0;
  for (std::string_view token : bytes) total += token.size();
  bytes_.reserve(total);
  offsets_.reserve(bytes.size() + 1);
  offsets_.push_back(0);
  for (std::string_view token : bytes) {
    bytes_ += token;
    offsets_.push_back(static_cast<int64_t>(bytes_.size()));
  }
}

std::string_view TokenBytes::operator[](int64_t id) const {
  KV_CHECK(contains(id)) << "token id: expected 0 <= id < " << size() << ", got " << id;
  const int64_t begin = offsets_[id];
  return std::string_view(bytes_).substr(begin, offsets_[id + 1] - begin);
}

}  // namespace kvcore
