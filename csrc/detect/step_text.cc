#include "detect/step_text.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kvcore {
namespace {

// White space beyond ASCII, in UTF-8.
constexpr std::string_view kWideBlanks[] = {"\u0085", "\u00a0", "\u1680", "\u2000", "\u2001",
                                            "\u2002", "\u2003", "\u2004", "\u2005", "\u2006",
                                            "\u2007", "\u2008", "\u2009", "\u200a", "\u2028",
                                            "\u2029", "\u202f", "\u205f", "\u3000"};

constexpr int64_t kNotBlank = 0;
constexpr int64_t kIncomplete = -1;

// Length of the white-space character that `text` starts with, kNotBlank, or kIncomplete if the
// text ends inside of what may become one. REQUIRES: text is not empty.
int64_t BlankLength(std::string_view text) {
  const unsigned char first = static_cast<unsigned char>(text[0]);
  if (first < 0x80) {
    const bool blank =
        first == ' ' || (first >= 0x09 && first <= 0x0d) || (first >= 0x1c && first <= 0x1f);
    return blank ? 1 : kNotBlank;
  }
  for (std::string_view blank : kWideBlanks) {
    const std::string_view head = text.substr(0, blank.size());
    if (head == blank) return static_cast<int64_t>(blank.size());
    if (head == blank.substr(0, head.size())) return kIncomplete;
  }
  return kNotBlank;
}

}  // namespace

StepText::StepText(std::vector<std::string> separators) : separators_(std::move(separators)) {
  for (const std::string& separator : separators_) {
    KV_CHECK(!separator.empty()) << "separators: expected at least one byte each, got none";
  }
}

void StepText::SkipBlank() {
  while (!has_content_ && blank_end_ < size()) {
    const int64_t length = BlankLength(std::string_view(bytes_).substr(blank_end_));
    if (length == kIncomplete) return;
    has_content_ = length == kNotBlank;
    blank_end_ += length;
  }
}

bool StepText::Append(std::string_view bytes) {
  const int64_t old_size = size();
  bytes_ += bytes;
  if (step_end_ != kOpen) return false;
  SkipBlank();
  if (!has_content_) return false;
  for (const std::string& separator : separators_) {
    // It may begin in the tokens before.
    const int64_t length = static_cast<int64_t>(separator.size());
    const size_t found = bytes_.find(separator, std::max(blank_end_ + 1, old_size - length + 1));
    if (found == std::string::npos) continue;
    const int64_t end = static_cast<int64_t>(found) + length;
    step_end_ = step_end_ == kOpen ? end : std::min(step_end_, end);
  }
  return step_end_ != kOpen;
}

}  // namespace kvcore
