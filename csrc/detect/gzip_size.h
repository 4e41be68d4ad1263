// Size of a gzip file in memory, without writing it.
//
// The definition is zlib's own deflate (not zlib-ng, libdeflate or isa-l, whose sizes differ) at
// level 9, memLevel 8, 32 KiB window, as a raw stream, plus a frame of 18 bytes: 10 of header,
// which names no file, and 8 of checksum and length. So many bytes has what Python's
// gzip.compress(data) returns where Python links the classic zlib.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

struct z_stream_s;

namespace kvcore {

// A deflate state (270 KB) that is set up once and reset for every input: setting it up costs
// several times the compression of a small input. Not thread-safe: one per thread.
class GzipSizer {
 public:
  // Throws InternalError if zlib fails.
  GzipSizer();

  // Bytes of the gzip file of `data`. Throws Error from 4 GiB on.
  int64_t Size(std::string_view data);

 private:
  struct Deleter {
    void operator()(z_stream_s* stream) const;
  };
  std::unique_ptr<z_stream_s, Deleter> stream_;
};

// The same for one input, setting up and dropping a state.
int64_t GzipSize(std::string_view data);

}  // namespace kvcore
