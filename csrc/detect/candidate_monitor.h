// Watches all running candidates: their text, the end of their step, and their degeneration.
//
// One Push() per decode step takes the token and the entropy of every running candidate at once.
// Candidates are known by ids that Open() hands out and never reuses. A candidate starts with
// empty text: a new reasoning step is a new candidate.
//
// Not thread-safe; Push() itself spreads its compressions over threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/tensor_view.h"
#include "detect/degeneration_detector.h"
#include "detect/gzip_size.h"
#include "detect/step_text.h"
#include "detect/token_bytes.h"

namespace kvcore {

class CandidateMonitor {
 public:
  // Throws Error if the config is invalid or tokens is null.
  CandidateMonitor(DetectorConfig config, std::shared_ptr<const TokenBytes> tokens);

  // A new candidate without text. detect=false: only its text and step end are followed.
  // separators: what ends its step (see StepText). Throws Error if one is empty.
  int64_t Open(bool detect, std::vector<std::string> separators = {"\n\n"});
  // Forgets the candidate. Throws Error if id is not open.
  void Close(int64_t id);
  int64_t num_open() const { return static_cast<int64_t>(candidates_.size()); }

  // Adds one token to each of n candidates.
  //   ids      i64 [n]  open candidates, no id twice
  //   tokens   i64 [n]
  //   entropy  f32 [n]  nats; read only for candidates with detect, and only if config.entropy
  //   firing   u8 [n]   out: the Firing of the test that fired at this very token
  //   step_end u8 [n]   out: 1 if the step ended at this very token
  // A candidate that fired or ended should be pushed no more; if it is, its text grows and both
  // outputs stay 0.
  // Throws Error, changing nothing, on an unknown id or token, or an entropy that is not finite.
  // Cost: well under a microsecond per candidate plus the compressions (see CompressionWindow),
  // which run in parallel when there are many.
  void Push(const TensorView& ids, const TensorView& tokens, const TensorView& entropy,
            const TensorView& firing, const TensorView& step_end);

  // All of these throw Error if id is not open.
  const std::string& Text(int64_t id) const;  // bytes of all tokens, the whole last one included
  int64_t StepEnd(int64_t id) const;          // byte offset behind the separator, or -1
  int64_t NumTokens(int64_t id) const;
  float MaxMeanEntropy(int64_t id) const;  // NaN if never tested
  double MinGzipRatio(int64_t id) const;   // over tested tokens; NaN if never tested
  int64_t FiredAt(int64_t id) const;       // token that fired, counted from 1; 0 if none
  // Ratio of the last config.gzip_window bytes as they stand now; NaN while the text is shorter.
  double GzipRatio(int64_t id);

 private:
  struct Candidate {
    explicit Candidate(std::vector<std::string> separators) : text(std::move(separators)) {}

    StepText text;
    std::unique_ptr<DegenerationDetector> detector;  // null: not screened
    int64_t num_tokens = 0;
    int64_t last_push = 0;  // finds ids that are given twice
  };

  Candidate& Find(int64_t id, const char* argument);
  const Candidate& Find(int64_t id) const;
  GzipSizer* Sizer(int64_t thread_id);
  void ResolveAndCheck(const TensorView& ids, const TensorView& tokens, const TensorView& entropy);

  const DetectorConfig config_;
  const std::shared_ptr<const TokenBytes> tokens_;
  std::unordered_map<int64_t, std::unique_ptr<Candidate>> candidates_;
  int64_t next_id_ = 0, num_pushes_ = 0;
  std::vector<std::unique_ptr<GzipSizer>> sizers_;  // by thread, made on first use
  std::vector<Candidate*> batch_;                   // of the running Push()
  std::vector<Candidate*> due_;                     // of those: compress
};

}  // namespace kvcore
