// Errors of the core and the two checks that raise them.
//
// Error         the caller is wrong: a bad argument. Python sees ValueError.
// OutOfBlocks   the pool has no block left for a request; nothing was changed.
// InternalError we are wrong: a broken invariant.
//
// KV_CHECK(cond) << "budget: expected >= 1, got " << budget;   throws Error
// KV_ICHECK(cond) << "lane longer than its table";             throws InternalError
// The message after << is built only when the condition is false.
#pragma once

#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>

namespace kvcore {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class OutOfBlocks : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

namespace check_internal {

template <typename E>
class Thrower {
 public:
  template <typename T>
  Thrower& operator<<(const T& value) {
    text_ << value;
    return *this;
  }
  // Ends the streaming expression; binds weaker than << and throws, unless a part of the message
  // has thrown already (an allocation).
  ~Thrower() noexcept(false) {
    if (std::uncaught_exceptions() == exceptions_) throw E(text_.str());
  }

 private:
  const int exceptions_ = std::uncaught_exceptions();
  std::ostringstream text_;
};

}  // namespace check_internal
}  // namespace kvcore

#define KV_CHECK(cond) \
  if (cond) {          \
  } else               \
    ::kvcore::check_internal::Thrower<::kvcore::Error>()

#define KV_ICHECK(cond) \
  if (cond) {           \
  } else                \
    ::kvcore::check_internal::Thrower<::kvcore::InternalError>() << "internal: " #cond ": "
