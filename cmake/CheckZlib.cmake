# kvcore_check_zlib(INCLUDE_DIR): refuses a zlib.h that is not the classic zlib's.
#
# The degeneration detector compares compressed sizes. zlib-ng, which some distributions install in
# zlib's place, compresses to other sizes, so that the detector would fire at other tokens.
function(kvcore_check_zlib include_dir)
  if(NOT EXISTS "${include_dir}/zlib.h")
    return()  # in the compiler's own search path: kvcore checks a size when it is imported
  endif()
  file(STRINGS "${include_dir}/zlib.h" versions
       REGEX "#[ \t]*define[ \t]+(ZLIBNG_VERSION|ZLIB_VERSION)[ \t]")
  foreach(line IN LISTS versions)
    if(line MATCHES "ZLIBNG_VERSION|zlib-ng")
      string(STRIP "${line}" line)
      message(FATAL_ERROR
        "zlib: expected the classic zlib, got zlib-ng (${include_dir}/zlib.h: ${line}).\n"
        "zlib-ng compresses to other sizes, which would change where kvcore ends degenerate text. "
        "Install the classic zlib in a directory of its own (https://zlib.net: "
        "./configure --static --prefix=DIR && make install) and name it:\n"
        "  KVCORE_ZLIB_ROOT=DIR pip install .\n"
        "  cmake -DZLIB_ROOT=DIR ...")
    endif()
  endforeach()
endfunction()
