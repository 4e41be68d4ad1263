// Oracles of csrc/detect: every law evaluated from its definition, at every token, from scratch.
// Also the generated texts that the detector tests share.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "detect/degeneration_detector.h"
#include "detect/token_bytes.h"

namespace kvcore::detect_oracle {

// zlib's one-call compress at level 9, with gzip's frame in place of zlib's.
int64_t GzipBytes(const std::string& data);

// Smallest offset behind a separator that has something other than white space before it; -1.
int64_t StepEnd(const std::string& text, const std::vector<std::string>& separators = {"\n\n"});

bool EntropyFires(const std::vector<float>& entropies, const DetectorConfig& config,
                  double* mean);  // at the last token; *mean NaN before the guard
bool GzipFires(const std::string& text, const DetectorConfig& config, double* ratio);  // NaN: short
bool RepetitionFires(const std::vector<int64_t>& tokens, const DetectorConfig& config);

// What happens to one candidate, token by token.
struct Verdict {
  Firing firing = Firing::kNone;
  int64_t fired_at = 0;       // from 1
  int64_t step_ended_at = 0;  // token, from 1; 0: never
  double max_mean_entropy;    // up to the firing token; NaN: never tested
  double min_ratio;           // over every token up to the firing one; NaN: never tested
  double last_ratio;          // of the whole text
  std::string text;
};
Verdict Judge(const std::vector<int64_t>& tokens, const std::vector<float>& entropies,
              const TokenBytes& table, const DetectorConfig& config);

enum class TextKind {
  kNatural,       // words of a small vocabulary with punctuation, numbers and line breaks
  kLoop,          // natural head, then one phrase of 1 to 400 bytes for ever
  kMutatingLoop,  // the same, with a random byte changed now and then
  kCounter,       // numbered lines of one phrase
  kWide,          // CJK characters and emoji, partly repeating
  kNoise,         // random bytes
  kLateLoop,      // noise of rare bytes, then a single character: the steepest fall of the ratio
  kLast = kLateLoop
};
std::string MakeText(TextKind kind, int64_t bytes, uint64_t seed);

// Cuts a text into tokens of 1 to max_token_bytes bytes (through characters), equal pieces sharing
// an id.
struct Tokens {
  std::vector<int64_t> ids;
  std::shared_ptr<const TokenBytes> table;
};
Tokens Cut(const std::string& text, int64_t max_token_bytes, uint64_t seed);

// A table and ids for pieces given by hand.
Tokens FromPieces(const std::vector<std::string>& pieces);

}  // namespace kvcore::detect_oracle
