// Repetition loops: how far the last bytes of a candidate's text compress.
//
// The ratio is gzip size over window size for the last `window` bytes (bytes, not characters or
// tokens: a window edge may cut a character). The test exists from the first token whose text has
// `window` bytes, and fires when ratio < threshold (strictly).
//
// Skipping ahead: `k` more bytes lower the gzip size of the window by at most 2 k + 32 bytes, so
// after a size of S nothing can fire before k > (S - threshold * window - 32) / 2. The bound is
// empirical: generated texts stay below k + 10, and windows found by hill climbing, noise that
// scrolls out of a loop, below 1.5 k + 29. It was found for windows of at most 800 bytes; larger
// ones are compressed at every token. Tests compare skipping with `exact`, which compresses at
// every token: both fire at the same one.
//
// Cost: 10 to 20 us per compression on ordinary text; with skipping about one token in 35 needs
// one. Source: KV-Rescue, equations 5 and 6, appendix C (threshold 0.18, window 800, level 9).
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>

#include "detect/gzip_size.h"

namespace kvcore {

class CompressionWindow {
 public:
  static constexpr int kLargestSkipping = 800;  // bytes; larger windows are always exact

  // REQUIRES: window >= 1.
  CompressionWindow(int window, double threshold, bool exact)
      : window_(window),
        threshold_(threshold),
        exact_(exact || window > kLargestSkipping),
        next_bytes_(window) {}

  // True if Test() must be called for a text of this length; false: the test cannot fire.
  bool Due(int64_t text_bytes) const { return text_bytes >= next_bytes_; }

  // Compresses the last `window` bytes of `text`; true if the test fires.
  // REQUIRES: Due(text.size()).
  bool Test(std::string_view text, GzipSizer* sizer);

  // Smallest ratio among the tested tokens; NaN if none was tested. Without `exact` this is an
  // upper bound of the minimum over all tokens (skipped tokens are known not to fire, no more).
  double min_ratio() const { return min_ratio_; }

 private:
  int64_t window_;
  double threshold_;
  bool exact_;
  int64_t next_bytes_;  // no text shorter than this can fire
  double min_ratio_ = std::numeric_limits<double>::quiet_NaN();
};

}  // namespace kvcore
