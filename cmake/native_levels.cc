// Prints how many instruction set levels beyond the base run on this machine.
#include <cstdio>
#include <initializer_list>

#include "cpu/isa.h"

int main() {
  using kvcore::Isa;
  int levels = 0;
  for (const Isa isa : {Isa::kV3, Isa::kV4, Isa::kV4Bf16}) levels += kvcore::IsaSupported(isa);
  std::printf("%d", levels);
}
