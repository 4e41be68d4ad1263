#include "support/detect_oracle.h"

#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <stdexcept>

namespace kvcore::detect_oracle {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

bool IsBlankPoint(uint32_t c) {
  return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
         c == 0x205f || c == 0x3000;
}

// One plain decoder step: the character at `at` and its length; a stray byte is U+FFFD.
uint32_t Decode(const std::string& s, size_t at, size_t* length) {
  const auto byte = [&](size_t i) -> uint32_t { return i < s.size() ? uint8_t(s[i]) : 0u; };
  const uint32_t b = byte(at);
  const auto tail = [&](size_t i) { return (byte(at + i) & 0xc0u) == 0x80u; };
  *length = 1;
  if (b < 0x80) return b;
  if (b >= 0xc2 && b < 0xe0 && tail(1)) {
    *length = 2;
    return (b & 0x1fu) << 6 | (byte(at + 1) & 0x3fu);
  }
  if (b >= 0xe0 && b < 0xf0 && tail(1) && tail(2)) {
    const uint32_t c = (b & 0xfu) << 12 | (byte(at + 1) & 0x3fu) << 6 | (byte(at + 2) & 0x3fu);
    if (c >= 0x800) {
      *length = 3;
      return c;
    }
  }
  return 0xfffd;
}

bool AllBlank(const std::string& s) {
  for (size_t at = 0, length; at < s.size(); at += length) {
    if (!IsBlankPoint(Decode(s, at, &length))) return false;
  }
  return true;
}

}  // namespace

int64_t GzipBytes(const std::string& data) {
  uLongf size = compressBound(data.size());
  std::string out(size, '\0');
  if (compress2(reinterpret_cast<Bytef*>(out.data()), &size,
                reinterpret_cast<const Bytef*>(data.data()), data.size(), 9) != Z_OK) {
    throw std::runtime_error("compress2 failed");
  }
  return static_cast<int64_t>(size) - 6 + 18;
}

int64_t StepEnd(const std::string& text, const std::vector<std::string>& separators) {
  for (size_t end = 1; end <= text.size(); ++end) {
    for (const std::string& separator : separators) {
      if (separator.size() > end) continue;
      const size_t begin = end - separator.size();
      if (text.substr(begin, separator.size()) != separator) continue;
      if (!AllBlank(text.substr(0, begin))) return static_cast<int64_t>(end);
    }
  }
  return -1;
}

bool EntropyFires(const std::vector<float>& entropies, const DetectorConfig& config, double* mean) {
  const int64_t e = static_cast<int64_t>(entropies.size());
  *mean = kNaN;
  if (e < config.entropy_guard || e == 0) return false;
  const int64_t first = std::max<int64_t>(0, e - config.entropy_window);
  double sum = 0;
  for (int64_t i = first; i < e; ++i) sum += entropies[i];
  *mean = sum / static_cast<double>(e - first);
  return *mean > config.entropy_threshold;
}

bool GzipFires(const std::string& text, const DetectorConfig& config, double* ratio) {
  const int64_t window = config.gzip_window;
  *ratio = kNaN;
  if (static_cast<int64_t>(text.size()) < window) return false;
  *ratio = static_cast<double>(GzipBytes(text.substr(text.size() - window))) /
           static_cast<double>(window);
  return *ratio < config.gzip_threshold;
}

bool RepetitionFires(const std::vector<int64_t>& tokens, const DetectorConfig& config) {
  const int64_t n = static_cast<int64_t>(tokens.size());
  for (int64_t p = 1; p <= config.repetition_max_pattern_size; ++p) {
    const int64_t span =
        std::max<int64_t>(p * config.repetition_min_count, config.repetition_min_tokens);
    if (span > n) continue;
    bool periodic = true;
    for (int64_t i = n - span + p; i < n; ++i) periodic &= tokens[i] == tokens[i - p];
    if (periodic) return true;
  }
  return false;
}

Verdict Judge(const std::vector<int64_t>& tokens, const std::vector<float>& entropies,
              const TokenBytes& table, const DetectorConfig& config) {
  Verdict v;
  v.max_mean_entropy = v.min_ratio = v.last_ratio = kNaN;
  std::vector<int64_t> ids;
  std::vector<float> nats;
  for (size_t i = 0; i < tokens.size(); ++i) {
    ids.push_back(tokens[i]);
    nats.push_back(entropies[i]);
    v.text += table[tokens[i]];
    if (v.step_ended_at == 0 && StepEnd(v.text) >= 0) v.step_ended_at = ids.size();
    if (v.firing != Firing::kNone) continue;
    double mean = kNaN, ratio = kNaN;
    if (config.entropy && EntropyFires(nats, config, &mean)) {
      v.firing = Firing::kEntropy;
    } else if (config.gzip && GzipFires(v.text, config, &ratio)) {
      v.firing = Firing::kGzip;
    } else if (config.repetition && RepetitionFires(ids, config)) {
      v.firing = Firing::kRepetition;
    }
    if (v.firing != Firing::kNone) v.fired_at = ids.size();
    v.max_mean_entropy = std::fmax(v.max_mean_entropy, mean);  // fmax ignores NaN
    v.min_ratio = std::fmin(v.min_ratio, ratio);
  }
  GzipFires(v.text, config, &v.last_ratio);
  return v;
}

std::string MakeText(TextKind kind, int64_t bytes, uint64_t seed) {
  std::mt19937_64 rng(seed);
  const auto below = [&](uint64_t n) { return rng() % n; };
  const auto word = [&] {
    std::string w;
    for (uint64_t i = 0, n = 1 + below(9); i < n; ++i) w += "etaoinshrdlucmfwygpb"[below(20)];
    return w;
  };
  std::vector<std::string> words(20 + below(400));
  for (std::string& w : words) w = word();
  const auto natural = [&](int64_t n) {
    std::string s;
    while (static_cast<int64_t>(s.size()) < n) {
      // The product of two draws favours small indices, like words do.
      s += words[below(words.size()) * below(words.size()) / words.size()];
      const uint64_t mark = below(24);
      s += mark == 0   ? ".\n"
           : mark == 1 ? ", "
           : mark == 2 ? " = " + std::to_string(below(999))
                       : " ";
    }
    s.resize(n);
    return s;
  };
  const auto wide = [&] {
    std::string s;
    const uint32_t point = below(4) == 0 ? 0x1f600 + below(64) : 0x4e00 + below(600);
    if (point < 0x10000) {
      s = {char(0xe0 | point >> 12), char(0x80 | (point >> 6 & 63)), char(0x80 | (point & 63))};
    } else {
      s = {char(0xf0 | point >> 18), char(0x80 | (point >> 12 & 63)),
           char(0x80 | (point >> 6 & 63)), char(0x80 | (point & 63))};
    }
    return s;
  };

  std::string text;
  switch (kind) {
    case TextKind::kNatural:
      text = natural(bytes);
      break;
    case TextKind::kLoop:
    case TextKind::kMutatingLoop: {
      text = natural(below(bytes / 2 + 1));
      const std::string phrase = natural(1 + below(400));
      while (static_cast<int64_t>(text.size()) < bytes) text += phrase;
      if (kind == TextKind::kLoop) break;
      const uint64_t every = 20 + below(400);
      for (uint64_t i = below(every); i < text.size(); i += 1 + below(2 * every)) {
        text[i] = static_cast<char>('a' + below(26));
      }
      break;
    }
    case TextKind::kCounter: {
      const std::string phrase = natural(3 + below(90));
      for (uint64_t i = below(1000); static_cast<int64_t>(text.size()) < bytes; i += 1 + below(3)) {
        text += std::to_string(i) + ". " + phrase + "\n";
      }
      break;
    }
    case TextKind::kWide: {
      while (static_cast<int64_t>(text.size()) < bytes / 3) text += wide();
      std::string phrase;
      for (uint64_t i = 0, n = 1 + below(60); i < n; ++i) phrase += wide();
      while (static_cast<int64_t>(text.size()) < bytes) text += phrase;
      break;
    }
    case TextKind::kNoise: {
      const uint64_t alphabet = 2 + below(255);
      while (static_cast<int64_t>(text.size()) < bytes) text += static_cast<char>(below(alphabet));
      break;
    }
    case TextKind::kLateLoop: {
      const uint64_t rare = below(800);
      for (uint64_t i = 0; i < rare; ++i) text += static_cast<char>(128 + below(128));
      const std::string phrase = natural(1 + below(40));
      while (static_cast<int64_t>(text.size()) < bytes) text += phrase;
      break;
    }
  }
  text.resize(bytes);
  return text;
}

Tokens FromPieces(const std::vector<std::string>& pieces) {
  Tokens tokens;
  std::map<std::string, int64_t> known;
  std::vector<std::string> table;
  for (const std::string& piece : pieces) {
    const auto [entry, is_new] = known.emplace(piece, static_cast<int64_t>(table.size()));
    if (is_new) table.push_back(piece);
    tokens.ids.push_back(entry->second);
  }
  tokens.table =
      std::make_shared<TokenBytes>(std::vector<std::string_view>(table.begin(), table.end()));
  return tokens;
}

Tokens Cut(const std::string& text, int64_t max_token_bytes, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::vector<std::string> pieces;
  for (size_t at = 0; at < text.size(); at += pieces.back().size()) {
    pieces.push_back(text.substr(at, 1 + rng() % max_token_bytes));
  }
  return FromPieces(pieces);
}

}  // namespace kvcore::detect_oracle
