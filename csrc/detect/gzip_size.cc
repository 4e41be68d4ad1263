#include "detect/gzip_size.h"

#include <zlib.h>

#include <limits>

#include "base/check.h"

namespace kvcore {
namespace {

constexpr int64_t kGzipFrameBytes = 18;  // 10 of header, 8 of trailer

}  // namespace

void GzipSizer::Deleter::operator()(z_stream_s* stream) const {
  deflateEnd(stream);
  delete stream;
}

GzipSizer::GzipSizer() {
  auto stream = std::make_unique<z_stream>();
  // Negative window bits: raw deflate, no header of its own.
  const int status = deflateInit2(stream.get(), 9, Z_DEFLATED, -15, 8, Z_DEFAULT_STRATEGY);
  KV_ICHECK(status == Z_OK) << "deflateInit2 returned " << status;
  stream_.reset(stream.release());
}

int64_t GzipSizer::Size(std::string_view data) {
  KV_CHECK(data.size() <= std::numeric_limits<uInt>::max())
      << "gzip input: expected less than 4 GiB, got " << data.size() << " bytes";
  KV_ICHECK(deflateReset(stream_.get()) == Z_OK) << "deflateReset failed";
  stream_->next_in = reinterpret_cast<Bytef*>(const_cast<char*>(data.data()));
  stream_->avail_in = static_cast<uInt>(data.size());
  unsigned char discarded[2048];
  int status;
  do {
    stream_->next_out = discarded;
    stream_->avail_out = sizeof(discarded);
    status = deflate(stream_.get(), Z_FINISH);
  } while (status == Z_OK);
  KV_ICHECK(status == Z_STREAM_END) << "deflate returned " << status;
  return static_cast<int64_t>(stream_->total_out) + kGzipFrameBytes;
}

int64_t GzipSize(std::string_view data) { return GzipSizer().Size(data); }

}  // namespace kvcore
