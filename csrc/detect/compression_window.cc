#include "detect/compression_window.h"

#include <algorithm>
#include <cmath>

namespace kvcore {
namespace {

constexpr double kDropPerByte = 2;
constexpr double kDropAtOnce = 32;

}  // namespace

bool CompressionWindow::Test(std::string_view text, GzipSizer* sizer) {
  const int64_t text_bytes = static_cast<int64_t>(text.size());
  const double size = static_cast<double>(sizer->Size(text.substr(text_bytes - window_)));
  const double window = static_cast<double>(window_);
  const double ratio = size / window;
  min_ratio_ = std::isnan(min_ratio_) ? ratio : std::min(min_ratio_, ratio);
  int64_t skip = 0;
  if (!exact_) {
    const double slack = size - threshold_ * window - kDropAtOnce;
    skip = static_cast<int64_t>(std::floor(std::max(slack, 0.0) / kDropPerByte));
  }
  next_bytes_ = text_bytes + skip + 1;
  return ratio < threshold_;
}

}  // namespace kvcore
