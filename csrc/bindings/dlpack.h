// The part of DLPack's C exchange interface that kvcore reads, declared here so that building needs
// no framework. The binary layout is fixed for every 1.x version.
//
// type(tensor).__dlpack_c_exchange_api__ is a capsule named "dlpack_exchange_api" around a
// DLPackExchangeApi that lives as long as the process.
// Source: DLPack 1.3, dlpack.h.
#pragma once

#include <cstdint>

namespace kvcore::dlpack {

inline constexpr uint32_t kMajorVersion = 1;
inline constexpr const char* kCapsuleName = "dlpack_exchange_api";
inline constexpr const char* kAttribute = "__dlpack_c_exchange_api__";

enum DeviceType : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3 };
enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null = contiguous (before version 1.2)
  uint64_t byte_offset;
};

// Describes a tensor without taking ownership: shape, strides and data belong to the tensor and are
// valid until it changes. 0 on success, -1 with a Python exception set.
using TensorFromPyObject = int (*)(void* py_object, Tensor* out);

struct ExchangeApi {
  uint32_t major, minor;
  void* previous;
  void* allocate;
  void* managed_from_py_object;
  void* managed_to_py_object;
  TensorFromPyObject tensor_from_py_object;  // may be null
  void* current_work_stream;
};

}  // namespace kvcore::dlpack
