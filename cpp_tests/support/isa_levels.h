// Runs a test once per instruction set level that was compiled and works on this machine.
#pragma once

#include <vector>

#include "cpu/isa.h"

namespace kvcore {

inline std::vector<Isa> SupportedIsas() {
  std::vector<Isa> levels;
  for (Isa isa : {Isa::kBase, Isa::kV3, Isa::kV4, Isa::kV4Bf16})
    if (IsaSupported(isa)) levels.push_back(isa);
  return levels;
}

// Makes a level active until the end of the scope.
class WithIsa {
 public:
  explicit WithIsa(Isa isa) : before_(ActiveIsa()) { SetIsa(isa); }
  ~WithIsa() { SetIsa(before_); }
  WithIsa(const WithIsa&) = delete;
  WithIsa& operator=(const WithIsa&) = delete;

 private:
  Isa before_;
};

}  // namespace kvcore
