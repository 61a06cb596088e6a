// The older interface of operators: descriptions of tensors and one call that compiles and runs. torch_npu uses
// it for operators without an aclnn function; only the two that change a tensor's format are simulated.
#include <acl/acl_op_compiler.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "state.h"

// The types behind the handles; their names are the interface's.
struct aclTensorDesc {
  aclDataType type;
  aclFormat format;
  std::vector<int64_t> shape;
  aclFormat storage_format;
  std::vector<int64_t> storage_shape;
};

struct aclDataBuffer {
  void* data;
  size_t bytes;
};

struct aclopAttr {};

namespace ascend_sim {
namespace {

constexpr aclFormat kNd = ACL_FORMAT_ND;
constexpr aclFormat kNz = ACL_FORMAT_FRACTAL_NZ;
constexpr std::int64_t kFractalRows = 16;

// A tensor's last two dimensions and the number of matrices before them.
struct Matrices {
  std::int64_t count;
  std::int64_t rows;
  std::int64_t columns;
};

Matrices matrices_of(const std::vector<int64_t>& shape) {
  if (shape.size() < 2) throw Refusal("TransData", "x", "FRACTAL_NZ needs two dimensions or more");
  return {std::accumulate(shape.begin(), shape.end() - 2, std::int64_t{1}, std::multiplies<>()),
          shape[shape.size() - 2], shape.back()};
}

// FRACTAL_NZ: the matrix in blocks of 16 rows and 32 bytes, the blocks of a block column one after another,
// rows inside a block one after another: [matrices, columns / block, rows / 16, 16, block], the rest padded
// with 0.
struct Fractal {
  Matrices matrices;
  std::int64_t block;  // columns of a block
  std::size_t element;

  Fractal(const std::vector<int64_t>& shape, std::size_t bytes)
      : matrices(matrices_of(shape)), block(bytes == 1 ? 32 : 16), element(bytes) {}

  std::int64_t block_rows() const { return (matrices.rows + kFractalRows - 1) / kFractalRows; }
  std::int64_t block_columns() const { return (matrices.columns + block - 1) / block; }
  std::size_t bytes() const {
    return static_cast<std::size_t>(matrices.count * block_columns() * block_rows() * kFractalRows * block) *
           element;
  }

  // Calls visit(offset in ND, offset in NZ, bytes) for each run of neighbouring elements.
  template <class F>
  void each_run(F&& visit) const {
    for (std::int64_t z = 0; z < matrices.count; ++z)
      for (std::int64_t row = 0; row < matrices.rows; ++row)
        for (std::int64_t column = 0; column < block_columns(); ++column) {
          std::int64_t flat = (z * matrices.rows + row) * matrices.columns + column * block;
          std::int64_t block_index = (z * block_columns() + column) * block_rows() + row / kFractalRows;
          std::int64_t fractal = (block_index * kFractalRows + row % kFractalRows) * block;
          std::int64_t run = std::min(block, matrices.columns - column * block);
          visit(static_cast<std::size_t>(flat) * element, static_cast<std::size_t>(fractal) * element,
                static_cast<std::size_t>(run) * element);
        }
  }
};

std::size_t bytes_of(const std::vector<int64_t>& shape, std::size_t element) {
  return static_cast<std::size_t>(
             std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>())) *
         element;
}

void check_buffer(const char* op, const char* name, const aclDataBuffer* buffer, std::size_t needed) {
  if (needed == 0) return;
  if (buffer->bytes < needed)
    throw Refusal(
        op, name,
        "has " + std::to_string(buffer->bytes) + " bytes and its format needs " + std::to_string(needed));
  if (!on_device(buffer->data, needed)) throw Refusal(op, name, "is not device memory");
}

bool is_plain(aclFormat format) {
  return format == kNd || format == ACL_FORMAT_NCHW || format == ACL_FORMAT_NHWC ||
         format == ACL_FORMAT_NCDHW || format == ACL_FORMAT_NCL;
}

void change_format(const std::string& op, const aclTensorDesc& from, const aclDataBuffer* source,
                   const aclTensorDesc& to, const aclDataBuffer* target, aclrtStream stream) {
  if (from.type != to.type) throw Refusal(op, "out", "has another data type than the input");
  const std::size_t element = aclDataTypeSize(from.type);
  const bool packs = to.storage_format == kNz && is_plain(from.storage_format);
  const bool unpacks = from.storage_format == kNz && is_plain(to.storage_format);
  const char* in = static_cast<const char*>(source->data);
  char* out = static_cast<char*>(target->data);
  if (!packs && !unpacks) {
    if (from.storage_format != to.storage_format &&
        !(is_plain(from.storage_format) && is_plain(to.storage_format)))
      throw Refusal(op, "out",
                    "only ND and FRACTAL_NZ are simulated, not format " + std::to_string(to.storage_format));
    std::size_t bytes = bytes_of(from.storage_shape, element);
    check_buffer(op.c_str(), "x", source, bytes);
    check_buffer(op.c_str(), "out", target, bytes);
    submit(stream, op, [=] { std::memmove(out, in, bytes); });
    return;
  }
  const Fractal fractal(packs ? from.storage_shape : to.storage_shape, element);
  const std::size_t flat = bytes_of(packs ? from.storage_shape : to.storage_shape, element);
  check_buffer(op.c_str(), "x", source, packs ? flat : fractal.bytes());
  check_buffer(op.c_str(), "out", target, packs ? fractal.bytes() : flat);
  submit(stream, op, [=] {
    if (packs) std::memset(out, 0, fractal.bytes());
    fractal.each_run([&](std::size_t nd, std::size_t nz, std::size_t bytes) {
      packs ? std::memcpy(out + nz, in + nd, bytes) : std::memcpy(out + nd, in + nz, bytes);
    });
  });
}

}  // namespace
}  // namespace ascend_sim

using namespace ascend_sim;  // NOLINT: definitions of the C interface only

extern "C" {

size_t aclDataTypeSize(aclDataType type) {
  switch (type) {
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_BOOL:
      return 1;
    case ACL_FLOAT16:
    case ACL_BF16:
    case ACL_INT16:
    case ACL_UINT16:
      return 2;
    case ACL_FLOAT:
    case ACL_INT32:
    case ACL_UINT32:
      return 4;
    case ACL_INT64:
    case ACL_UINT64:
    case ACL_DOUBLE:
    case ACL_COMPLEX64:
      return 8;
    case ACL_COMPLEX128:
      return 16;
    default:
      return 0;
  }
}

aclTensorDesc* aclCreateTensorDesc(aclDataType type, int count, const int64_t* dims, aclFormat format) {
  std::vector<int64_t> shape(dims, dims + count);
  return new aclTensorDesc{type, format, shape, format, shape};
}
void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }
aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return desc->type; }
aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) { return desc->format; }
size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc->shape.size(); }
aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t index, int64_t* size) {
  if (index >= desc->shape.size()) return ACL_ERROR_INVALID_PARAM;
  *size = desc->shape[index];
  return ACL_SUCCESS;
}
aclError aclSetTensorFormat(aclTensorDesc* desc, aclFormat format) {
  desc->storage_format = format;
  return ACL_SUCCESS;
}
aclError aclSetTensorShape(aclTensorDesc* desc, int count, const int64_t* dims) {
  desc->storage_shape.assign(dims, dims + count);
  return ACL_SUCCESS;
}
void aclSetTensorDescName(aclTensorDesc*, const char*) {}
aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }

aclDataBuffer* aclCreateDataBuffer(void* data, size_t bytes) { return new aclDataBuffer{data, bytes}; }
aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete buffer;
  return ACL_SUCCESS;
}

// The attributes of the two operators repeat the descriptions.
aclopAttr* aclopCreateAttr() { return new aclopAttr; }
void aclopDestroyAttr(const aclopAttr* attr) { delete attr; }
aclError aclopSetAttrBool(aclopAttr*, const char*, uint8_t) { return ACL_SUCCESS; }
aclError aclopSetAttrInt(aclopAttr*, const char*, int64_t) { return ACL_SUCCESS; }
aclError aclopSetAttrFloat(aclopAttr*, const char*, float) { return ACL_SUCCESS; }
aclError aclopSetAttrString(aclopAttr*, const char*, const char*) { return ACL_SUCCESS; }
aclError aclopSetAttrDataType(aclopAttr*, const char*, aclDataType) { return ACL_SUCCESS; }
aclError aclopSetAttrListBool(aclopAttr*, const char*, int, const uint8_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListInt(aclopAttr*, const char*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListFloat(aclopAttr*, const char*, int, const float*) { return ACL_SUCCESS; }
aclError aclopSetAttrListListInt(aclopAttr*, const char*, int, const int*, const int64_t* const[]) {
  return ACL_SUCCESS;
}

aclError aclopCompileAndExecute(const char* op, int inputs, const aclTensorDesc* const input_descs[],
                                const aclDataBuffer* const input_data[], int outputs,
                                const aclTensorDesc* const output_descs[], aclDataBuffer* const output_data[],
                                const aclopAttr*, aclopEngineType, aclopCompileType, const char*,
                                aclrtStream stream) {
  return reporting("aclopCompileAndExecute", [&] {
    if (std::strcmp(op, "Identity") != 0 && std::strcmp(op, "TransData") != 0) {
      throw RuntimeError(ACL_ERROR_OP_NOT_FOUND,
                         std::string(op) + " is not simulated: its aclnn function is missing, too");
    }
    if (inputs != 1 || outputs != 1) throw Refusal(op, "x", "takes one input and gives one output");
    change_format(op, *input_descs[0], input_data[0], *output_descs[0], output_data[0], stream);
  });
}

aclError aclopCompileAndExecuteV2(const char* op, int inputs, aclTensorDesc* input_descs[],
                                  aclDataBuffer* input_data[], int outputs, aclTensorDesc* output_descs[],
                                  aclDataBuffer* output_data[], aclopAttr* attr, aclopEngineType engine,
                                  aclopCompileType type, const char* path, aclrtStream stream) {
  return aclopCompileAndExecute(op, inputs, input_descs, input_data, outputs, output_descs, output_data, attr,
                                engine, type, path, stream);
}

// Options of the operator compiler, which is not simulated.
aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }
// torch_npu only queries whether operators are compiled when they are called: they are not.
size_t aclGetCompileoptSize(aclCompileOpt) { return sizeof "disable"; }
aclError aclGetCompileopt(aclCompileOpt option, char* value, size_t room) {
  return reporting("aclGetCompileopt", [&] {
    if (option != ACL_OP_JIT_COMPILE || room < sizeof "disable")
      throw RuntimeError(ACL_ERROR_API_NOT_SUPPORT, "only ACL_OP_JIT_COMPILE is simulated");
    std::strcpy(value, "disable");
  });
}
}
