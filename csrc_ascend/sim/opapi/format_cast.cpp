// The cast between ND and FRACTAL_NZ of CANN 9.1, which older releases leave to the graph engine. Source: the
// documentation of aclnnNpuFormatCast in CANN's ops-nn.
#include <algorithm>

#include "sim/opapi/table.h"

using namespace ascend_sim;  // NOLINT: definitions of the C interface only

namespace {

constexpr const char* kName = "aclnnNpuFormatCast";
constexpr int64_t kFractalRows = 16;

// [..., rows, columns] → [..., columns / block, rows / 16, 16, block]; a block is 32 bytes of a row.
std::vector<int64_t> fractal_shape(const aclTensor& tensor) {
  std::vector<int64_t> shape = tensor.view.sizes().vec();
  require(shape.size() >= 2, "srcTensor", "FRACTAL_NZ needs two axes or more");
  const int64_t block = tensor.view.element_size() == 1 ? 32 : 16;
  const int64_t columns = shape.back(), rows = shape[shape.size() - 2];
  shape.resize(shape.size() - 2);
  shape.insert(shape.end(),
               {(columns + block - 1) / block, (rows + kFractalRows - 1) / kFractalRows, kFractalRows, block});
  return shape;
}

at::Tensor to_fractal(const at::Tensor& plain, at::IntArrayRef fractal) {
  const int64_t block = fractal.back(), rows = fractal[fractal.size() - 3] * kFractalRows;
  const int64_t columns = fractal[fractal.size() - 4] * block;
  const at::Tensor padded = at::constant_pad_nd(plain, {0, columns - plain.size(-1), 0, rows - plain.size(-2)});
  std::vector<int64_t> split(fractal.begin(), fractal.end() - 4);
  split.insert(split.end(), {rows / kFractalRows, kFractalRows, columns / block, block});
  // the block columns in front of the block rows
  return padded.reshape(split).movedim(-2, -4);
}

Work cast(const aclTensor* source, aclTensor* target) {
  require(source != nullptr, "srcTensor", "must not be null");
  require(target != nullptr, "dstTensor", "must not be null");
  require(source->view.is_contiguous(), "srcTensor", "must be contiguous");
  const bool packs = target->format == ACL_FORMAT_FRACTAL_NZ;
  require(packs != (source->format == ACL_FORMAT_FRACTAL_NZ), "dstTensor",
          "only casts between ND and FRACTAL_NZ are simulated");
  const std::vector<int64_t> shape = fractal_shape(*source);
  require((packs ? target : source)->storage_shape == shape, packs ? "dstTensor" : "srcTensor",
          "its storage has another shape than the cast computes");
  // checks that its memory is the device's
  const Weight in(*source, "srcTensor");
  at::Tensor out = target->view;
  if (packs) out = at::from_blob(out.data_ptr(), shape, in.options());
  require(out.is_contiguous() && on_device(out.data_ptr(), out.nbytes()), "dstTensor",
          "must be contiguous device memory");
  costs({bytes_of(source->view), bytes_of(out)});
  return [=] { out.copy_(packs ? to_fractal(in, shape) : in.nd()); };
}

[[maybe_unused]] const bool listed = cann() >= 901 && add_operator(kName);

}  // namespace

#define ASCEND_SIM_API extern "C" __attribute__((visibility("default")))

// Shape and format of the cast's result. The caller frees the shape with delete[].
ASCEND_SIM_API aclnnStatus aclnnNpuFormatCastCalculateSizeAndFormat(const aclTensor* source, int format,
                                                                    int dtype, int64_t** shape, uint64_t* rank,
                                                                    int* actual_format) {
  return reporting("aclnnNpuFormatCastCalculateSizeAndFormat", [&] {
    const auto refuse_unless = [](bool holds, const char* argument, const std::string& why) {
      if (!holds) throw Refusal("aclnnNpuFormatCastCalculateSizeAndFormat", argument, why);
    };
    refuse_unless(cann() >= 901, "srcTensor", "the operator came with CANN 9.1");
    refuse_unless(source != nullptr, "srcTensor", "must not be null");
    // float32 is cast in tiles of 16 elements, as if it were float16
    const bool known =
        dtype == -1 || dtype == source->dtype || (source->dtype == ACL_FLOAT && dtype == ACL_FLOAT16);
    refuse_unless(known, "additionalDtype", std::to_string(dtype) + " of another type is not simulated");
    const bool packs = format == ACL_FORMAT_FRACTAL_NZ;
    refuse_unless(packs || format == ACL_FORMAT_ND, "dstFormat", "only ND and FRACTAL_NZ are simulated");
    const std::vector<int64_t> dims = packs ? fractal_shape(*source) : source->view.sizes().vec();
    *rank = dims.size();
    *shape = new int64_t[dims.size()];
    std::copy(dims.begin(), dims.end(), *shape);
    *actual_format = format;
  });
}

ASCEND_SIM_API aclnnStatus aclnnNpuFormatCastGetWorkspaceSize(const aclTensor* source, aclTensor* target,
                                                              uint64_t* workspace, aclOpExecutor** executor) {
  return plan(
      kName, [&] { return cast(source, target); }, [] { return trace_line(kName, {}, {}); }, workspace,
      executor);
}

ASCEND_SIM_API aclnnStatus aclnnNpuFormatCast(void* workspace, uint64_t bytes, aclOpExecutor* executor,
                                              aclrtStream stream) {
  return launch(kName, workspace, bytes, executor, stream);
}
