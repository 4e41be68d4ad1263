// The text of one candidate and the place where its reasoning step ends.
//
// A step ends where the first of its separators is complete that begins behind the first byte that
// is not white space, so that no step is empty, nor only a separator. The search runs over decoded
// bytes: tokenizers merge a separator with what stands before it (".\n\n") or split it ("\n" +
// "\n"). The last token is kept whole, so the text may continue behind the end of the step.
//
// White space is what Unicode's White_Space property and Python's str.strip() agree on (and
// 0x1c..0x1f, which only Python counts). Bytes that are no valid UTF-8 are not white space.
// Cost: amortised O(bytes appended * separators). Not thread-safe.
// Source: KV-Rescue, setup (steps delimited by an empty line).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvcore {

class StepText {
 public:
  static constexpr int64_t kOpen = -1;

  // Any byte strings; without one the step never ends. Throws Error if one is empty.
  explicit StepText(std::vector<std::string> separators = {"\n\n"});

  // Appends one token's bytes. True if the step ends inside this token (at most once per text).
  bool Append(std::string_view bytes);

  const std::string& bytes() const { return bytes_; }
  int64_t size() const { return static_cast<int64_t>(bytes_.size()); }
  // Offset just behind the separator, or kOpen while the step has not ended.
  int64_t step_end() const { return step_end_; }

 private:
  void SkipBlank();

  std::vector<std::string> separators_;
  std::string bytes_;
  int64_t blank_end_ = 0;     // bytes_[0, blank_end_) is white space, whole characters
  bool has_content_ = false;  // bytes_[blank_end_] starts something else
  int64_t step_end_ = kOpen;
};

}  // namespace kvcore
