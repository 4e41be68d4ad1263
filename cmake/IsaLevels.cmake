# kvcore_isa_levels(RESULT): how many instruction set levels beyond the base to compile, in the order
# v3, v4, bf16 (csrc/cpu/isa.h).
#
# KVCORE_ISA_LEVELS = all: every level, picked at load. native: those that run on this machine, which
# is all that tests can look at; sanitizers multiply the compile time of every level.
function(kvcore_isa_levels result)
  if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set(${result} 0 PARENT_SCOPE)
    return()
  endif()
  if(KVCORE_ISA_LEVELS STREQUAL "all")
    set(${result} 3 PARENT_SCOPE)
    return()
  elseif(NOT KVCORE_ISA_LEVELS STREQUAL "native")
    message(FATAL_ERROR "KVCORE_ISA_LEVELS: expected all or native, got '${KVCORE_ISA_LEVELS}'")
  endif()
  if(NOT DEFINED KVCORE_NATIVE_LEVELS)
    set(program "${CMAKE_CURRENT_BINARY_DIR}/native_levels")
    execute_process(
      COMMAND ${CMAKE_CXX_COMPILER} -std=c++20 -DKVCORE_X86_LEVELS=3 -I csrc
              cmake/native_levels.cc csrc/cpu/isa.cc -o "${program}"
      WORKING_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}" COMMAND_ERROR_IS_FATAL ANY)
    execute_process(COMMAND "${program}" OUTPUT_VARIABLE levels COMMAND_ERROR_IS_FATAL ANY)
    set(KVCORE_NATIVE_LEVELS ${levels} CACHE INTERNAL "levels that run on this machine")
  endif()
  set(${result} ${KVCORE_NATIVE_LEVELS} PARENT_SCOPE)
endfunction()
