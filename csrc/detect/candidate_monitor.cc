#include "detect/candidate_monitor.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/check.h"
#include "base/parallel.h"
#include "base/tensor_match.h"

namespace kvcore {
namespace {

// Fewer compressions than this (10 to 20 us each) do not repay waking other threads.
constexpr int64_t kMinParallel = 32;

}  // namespace

CandidateMonitor::CandidateMonitor(DetectorConfig config, std::shared_ptr<const TokenBytes> tokens)
    : config_(config), tokens_(std::move(tokens)) {
  config_.Validate();
  KV_CHECK(tokens_ != nullptr) << "token_bytes: expected a table, got none";
}

int64_t CandidateMonitor::Open(bool detect, std::vector<std::string> separators) {
  auto candidate = std::make_unique<Candidate>(std::move(separators));
  if (detect) candidate->detector = std::make_unique<DegenerationDetector>(config_);
  const int64_t id = next_id_++;
  candidates_.emplace(id, std::move(candidate));
  return id;
}

void CandidateMonitor::Close(int64_t id) {
  Find(id, "id");
  candidates_.erase(id);
}

CandidateMonitor::Candidate& CandidateMonitor::Find(int64_t id, const char* argument) {
  const auto found = candidates_.find(id);
  KV_CHECK(found != candidates_.end()) << argument << ": expected an open candidate, got " << id;
  return *found->second;
}

const CandidateMonitor::Candidate& CandidateMonitor::Find(int64_t id) const {
  return const_cast<CandidateMonitor*>(this)->Find(id, "id");
}

GzipSizer* CandidateMonitor::Sizer(int64_t thread_id) {
  std::unique_ptr<GzipSizer>& sizer = sizers_[thread_id];
  if (sizer == nullptr) sizer = std::make_unique<GzipSizer>();
  return sizer.get();
}

// Fills batch_ and rejects whatever Push() must not start with.
void CandidateMonitor::ResolveAndCheck(const TensorView& ids, const TensorView& tokens,
                                       const TensorView& entropy) {
  ++num_pushes_;
  batch_.clear();
  for (int64_t i = 0; i < ids.shape[0]; ++i) {
    const int64_t id = ids.ptr<int64_t>()[i], token = tokens.ptr<int64_t>()[i];
    Candidate& candidate = Find(id, "ids");
    KV_CHECK(candidate.last_push != num_pushes_)
        << "ids: expected every candidate once, got " << id << " twice";
    candidate.last_push = num_pushes_;
    KV_CHECK(tokens_->contains(token)) << "tokens: expected 0 <= token < " << tokens_->size()
                                       << " for candidate " << id << ", got " << token;
    if (candidate.detector != nullptr && config_.entropy) {
      const float nats = entropy.ptr<float>()[i];
      KV_CHECK(std::isfinite(nats))
          << "entropy: expected a finite number of nats for candidate " << id << ", got " << nats;
    }
    batch_.push_back(&candidate);
  }
}

void CandidateMonitor::Push(const TensorView& ids, const TensorView& tokens,
                            const TensorView& entropy, const TensorView& firing,
                            const TensorView& step_end) {
  Dims dims;
  MatchTensor({"candidates"}).DType(DType::kI64).Contiguous().Check(ids, "ids", &dims);
  MatchTensor({"candidates"}).DType(DType::kI64).Contiguous().Check(tokens, "tokens", &dims);
  MatchTensor({"candidates"}).DType(DType::kF32).Contiguous().Check(entropy, "entropy", &dims);
  MatchTensor({"candidates"}).DType(DType::kU8).Contiguous().Check(firing, "firing", &dims);
  MatchTensor({"candidates"}).DType(DType::kU8).Contiguous().Check(step_end, "step_end", &dims);
  ResolveAndCheck(ids, tokens, entropy);

  // The cheap part runs here, the compressions that it asks for run in parallel.
  const int64_t n = ids.shape[0];
  due_.clear();
  for (int64_t i = 0; i < n; ++i) {
    Candidate& c = *batch_[i];
    const int64_t token = tokens.ptr<int64_t>()[i];
    const bool ended = c.text.Append((*tokens_)[token]);
    ++c.num_tokens;
    step_end.ptr<uint8_t>()[i] = ended ? 1 : 0;
    if (c.detector == nullptr) continue;
    const float nats = config_.entropy ? entropy.ptr<float>()[i] : 0.0f;
    if (c.detector->Push(static_cast<int32_t>(token), nats, c.text.size())) due_.push_back(&c);
  }

  const int64_t num_due = static_cast<int64_t>(due_.size());
  const int threads = NumThreads();
  sizers_.resize(std::max<size_t>(sizers_.size(), threads));
  const auto compress = [this](int64_t begin, int64_t end, int thread_id) {
    for (int64_t i = begin; i < end; ++i) {
      due_[i]->detector->TestWindow(due_[i]->text.bytes(), Sizer(thread_id));
    }
  };
  if (num_due >= kMinParallel) {
    ParallelFor(num_due, 4, threads, compress);
  } else {
    compress(0, num_due, 0);
  }

  for (int64_t i = 0; i < n; ++i) {
    const Candidate& c = *batch_[i];
    const bool now = c.detector != nullptr && c.detector->fired_at() == c.num_tokens;
    firing.ptr<uint8_t>()[i] = static_cast<uint8_t>(now ? c.detector->firing() : Firing::kNone);
  }
}

const std::string& CandidateMonitor::Text(int64_t id) const { return Find(id).text.bytes(); }

int64_t CandidateMonitor::StepEnd(int64_t id) const { return Find(id).text.step_end(); }

int64_t CandidateMonitor::NumTokens(int64_t id) const { return Find(id).num_tokens; }

float CandidateMonitor::MaxMeanEntropy(int64_t id) const {
  const Candidate& c = Find(id);
  return c.detector ? static_cast<float>(c.detector->max_mean_entropy())
                    : std::numeric_limits<float>::quiet_NaN();
}

double CandidateMonitor::MinGzipRatio(int64_t id) const {
  const Candidate& c = Find(id);
  return c.detector ? c.detector->min_gzip_ratio() : std::numeric_limits<double>::quiet_NaN();
}

int64_t CandidateMonitor::FiredAt(int64_t id) const {
  const Candidate& c = Find(id);
  return c.detector ? c.detector->fired_at() : 0;
}

double CandidateMonitor::GzipRatio(int64_t id) {
  const std::string& text = Find(id, "id").text.bytes();
  const int64_t window = config_.gzip_window, text_bytes = static_cast<int64_t>(text.size());
  if (window < 1 || text_bytes < window) return std::numeric_limits<double>::quiet_NaN();
  const std::string_view tail = std::string_view(text).substr(text_bytes - window);
  return static_cast<double>(GzipSize(tail)) / static_cast<double>(window);
}

}  // namespace kvcore
