// The degeneration detector for Python.
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/tensor_caster.h"
#include "detect/candidate_monitor.h"
#include "detect/gzip_size.h"

namespace py = pybind11;

namespace kvcore {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

std::shared_ptr<TokenBytes> MakeTokenBytes(const std::vector<py::bytes>& tokens) {
  const std::vector<std::string_view> views(tokens.begin(), tokens.end());
  return std::make_shared<TokenBytes>(views);
}

py::bytes Bytes(std::string_view s) { return py::bytes(s.data(), s.size()); }

void BindMonitor(py::module_& m) {
  const DetectorConfig defaults;
  py::class_<CandidateMonitor>(m, "CandidateMonitor")
      .def(py::init([](std::shared_ptr<TokenBytes> token_bytes, bool entropy,
                       float entropy_threshold, int entropy_window, int entropy_guard, bool gzip,
                       double gzip_threshold, int gzip_window, bool gzip_exact, bool repetition,
                       int max_pattern_size, int min_count, int min_tokens) {
             DetectorConfig config;
             config.entropy = entropy;
             config.entropy_threshold = entropy_threshold;
             config.entropy_window = entropy_window;
             config.entropy_guard = entropy_guard;
             config.gzip = gzip;
             config.gzip_threshold = gzip_threshold;
             config.gzip_window = gzip_window;
             config.gzip_exact = gzip_exact;
             config.repetition = repetition;
             config.repetition_max_pattern_size = max_pattern_size;
             config.repetition_min_count = min_count;
             config.repetition_min_tokens = min_tokens;
             return std::make_unique<CandidateMonitor>(config, std::move(token_bytes));
           }),
           py::arg("token_bytes"), py::kw_only(), py::arg("entropy") = defaults.entropy,
           py::arg("entropy_threshold") = defaults.entropy_threshold,
           py::arg("entropy_window") = defaults.entropy_window,
           py::arg("entropy_guard") = defaults.entropy_guard, py::arg("gzip") = defaults.gzip,
           py::arg("gzip_threshold") = defaults.gzip_threshold,
           py::arg("gzip_window") = defaults.gzip_window,
           py::arg("gzip_exact") = defaults.gzip_exact, py::arg("repetition") = defaults.repetition,
           py::arg("repetition_max_pattern_size") = defaults.repetition_max_pattern_size,
           py::arg("repetition_min_count") = defaults.repetition_min_count,
           py::arg("repetition_min_tokens") = defaults.repetition_min_tokens)
      .def(
          "open",
          [](CandidateMonitor& monitor, bool detect, const std::vector<py::bytes>& separators) {
            return monitor.Open(detect, {separators.begin(), separators.end()});
          },
          py::arg("detect"), py::arg("separators") = std::vector<py::bytes>{py::bytes("\n\n")})
      .def("close", &CandidateMonitor::Close, py::arg("id"))
      .def("num_open", &CandidateMonitor::num_open)
      .def(
          "push",
          [](CandidateMonitor& monitor, const TensorArg<"ids">& ids,
             const TensorArg<"tokens">& tokens, const TensorArg<"entropy">& entropy,
             const TensorArg<"firing">& firing, const TensorArg<"step_end">& step_end) {
            monitor.Push(ids, tokens, entropy, firing, step_end);
          },
          py::arg("ids"), py::arg("tokens"), py::arg("entropy"), py::arg("firing"),
          py::arg("step_end"), NoGil())
      .def(
          "text",
          [](const CandidateMonitor& monitor, int64_t id) { return Bytes(monitor.Text(id)); },
          py::arg("id"))
      .def("step_end", &CandidateMonitor::StepEnd, py::arg("id"))
      .def("num_tokens", &CandidateMonitor::NumTokens, py::arg("id"))
      .def("max_mean_entropy", &CandidateMonitor::MaxMeanEntropy, py::arg("id"))
      .def("min_gzip_ratio", &CandidateMonitor::MinGzipRatio, py::arg("id"))
      .def("gzip_ratio", &CandidateMonitor::GzipRatio, py::arg("id"))
      .def("fired_at", &CandidateMonitor::FiredAt, py::arg("id"));
}

}  // namespace

void BindDetect(py::module_& m) {
  py::class_<TokenBytes, std::shared_ptr<TokenBytes>>(m, "TokenBytes")
      .def(py::init(&MakeTokenBytes), py::arg("tokens"))
      .def("__len__", &TokenBytes::size)
      .def(
          "__getitem__", [](const TokenBytes& table, int64_t id) { return Bytes(table[id]); },
          py::arg("id"));
  BindMonitor(m);
  m.def(
      "gzip_size", [](const py::bytes& data) { return GzipSize(std::string_view(data)); },
      py::arg("data"));
}

}  // namespace kvcore
