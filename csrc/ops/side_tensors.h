// Tensors that a cache keeps beside keys and values, by name.
#pragma once

#include <cstring>
#include <initializer_list>
#include <string_view>

#include "base/check.h"
#include "base/tensor_view.h"

namespace kvcore {

struct SideTensor {
  static constexpr size_t kMaxName = 31;

  char name[kMaxName + 1] = "";
  TensorView tensor;
  TensorView start;  // what new places begin with; empty: they are left as they are

  bool empty() const { return tensor.empty(); }
};

// At most kMax of them, in place: a view is copied without an allocation.
class SideTensors {
 public:
  static constexpr int kMax = 12;

  // The names in `known` have the first places, in this order; they are empty until set.
  SideTensors(std::initializer_list<const char*> known = {}) {
    for (const char* name : known) std::strcpy(items_[count_++].name, name);
  }
  // Throws Error: a name that is empty, too long or set already, or no place left.
  void Set(std::string_view name, const TensorView& tensor, const TensorView& start = {}) {
    KV_CHECK(!name.empty() && name.size() <= SideTensor::kMaxName)
        << "name: expected 1 to " << SideTensor::kMaxName << " bytes, got '" << std::string(name)
        << "'";
    int at = 0;
    while (at < count_ && name != items_[at].name) ++at;
    KV_CHECK(at < kMax) << name << ": expected at most " << kMax << " tensors beside the keys";
    KV_CHECK(items_[at].empty()) << name << ": expected each name once";
    name.copy(items_[at].name, name.size());
    items_[at].tensor = tensor;
    items_[at].start = start;
    if (at == count_) ++count_;
  }
  // Null if there is none or it is empty.
  const SideTensor* Find(std::string_view name) const {
    for (const SideTensor& item : *this)
      if (name == item.name) return item.empty() ? nullptr : &item;
    return nullptr;
  }
  const SideTensor& operator[](int at) const { return items_[at]; }
  // Empty ones included.
  const SideTensor* begin() const { return items_; }
  const SideTensor* end() const { return items_ + count_; }

 private:
  SideTensor items_[kMax];
  int count_ = 0;
};

}  // namespace kvcore
