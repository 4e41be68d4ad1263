// The text of one candidate and the place where its reasoning step ends.
//
// A step ends with the first "\n\n" that comes after at least one character that is not white
// space, so that no step is empty. The search runs over decoded bytes: tokenizers merge the
// delimiter with what stands before it (".\n\n") or split it ("\n" + "\n"). The last token is kept
// whole, so the text may continue behind the end of the step.
//
// White space is what Unicode's White_Space property and Python's str.strip() agree on (and
// 0x1c..0x1f, which only Python counts). Bytes that are no valid UTF-8 are not white space.
// Cost: amortised O(bytes appended). Not thread-safe.
// Source: KV-Rescue, setup (steps delimited by an empty line).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace kvcore {

class StepText {
 public:
  static constexpr int64_t kOpen = -1;

  // Appends one token's bytes. True if the step ends inside this token (at most once per text).
  bool Append(std::string_view bytes);

  const std::string& bytes() const { return bytes_; }
  int64_t size() const { return static_cast<int64_t>(bytes_.size()); }
  // Offset just behind the delimiter, or kOpen while the step has not ended.
  int64_t step_end() const { return step_end_; }

 private:
  void SkipBlank();

  std::string bytes_;
  int64_t blank_end_ = 0;     // bytes_[0, blank_end_) is white space, whole characters
  bool has_content_ = false;  // bytes_[blank_end_] starts something else
  int64_t step_end_ = kOpen;
};

}  // namespace kvcore
