// The bytes that every token id of a vocabulary stands for.
//
// One token may be any byte string: a part of a character, several characters, or nothing (special
// tokens that do not belong to the text). Immutable after construction, so threads may share it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvcore {

class TokenBytes {
 public:
  // bytes[id] belongs to token id. Copies everything into one array.
  // Throws Error if there are more than 2^31 - 1 tokens.
  explicit TokenBytes(const std::vector<std::string_view>& bytes);

  int64_t size() const { return static_cast<int64_t>(offsets_.size()) - 1; }
  bool contains(int64_t id) const { return id >= 0 && id < size(); }
  // The view lives as long as this table. Throws Error if id is not in [0, size()).
  std::string_view operator[](int64_t id) const;

 private:
  std::string bytes_;             // all tokens one after the other
  std::vector<int64_t> offsets_;  // token id is bytes_[offsets_[id], offsets_[id + 1])
};

}  // namespace kvcore
