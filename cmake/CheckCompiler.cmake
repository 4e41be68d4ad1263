# kvcore_check_compiler(): refuses a compiler that cannot build kvcore, before anything compiles.
# Reads CMAKE_CXX_COMPILER, CMAKE_CXX_COMPILER_ID and CMAKE_CXX_COMPILER_VERSION.
#
# The kernels need __builtin_shufflevector and C++20 atomics that can wait.
set(KVCORE_OLDEST_GNU 12)
set(KVCORE_OLDEST_Clang 15)
set(KVCORE_OLDEST_AppleClang 15)

function(kvcore_check_compiler)
  set(oldest "${KVCORE_OLDEST_${CMAKE_CXX_COMPILER_ID}}")
  if(oldest AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL oldest)
    return()
  endif()
  set(name "${CMAKE_CXX_COMPILER_ID}")
  if(name STREQUAL "GNU")
    set(name "GCC")
  elseif(name STREQUAL "")
    set(name "an unknown compiler")
  endif()
  message(FATAL_ERROR
    "C++ compiler: expected GCC >= ${KVCORE_OLDEST_GNU}, Clang >= ${KVCORE_OLDEST_Clang} or "
    "AppleClang >= ${KVCORE_OLDEST_AppleClang}, got ${name} ${CMAKE_CXX_COMPILER_VERSION} "
    "(${CMAKE_CXX_COMPILER}).\n"
    "Install one and name it in the environment variable CXX, for example on Debian or Ubuntu:\n"
    "  apt-get install g++-12\n"
    "  CXX=g++-12 pip install .\n"
    "A build directory that was configured with another compiler must be removed first.")
endfunction()
