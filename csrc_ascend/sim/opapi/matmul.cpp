// Products of matrices. Sums are kept in float32 and rounded once, as the matrix unit does.
#include "sim/opapi/table.h"

using namespace ascend_sim;

namespace {

constexpr const char* kCubeMathType = "cubeMathType";

// The documented types: float32, float16 and bfloat16, both the same, and the same for the result where there
// is no addend. (That of halves may be float32 on a later chip, which is not simulated.)
void require_product(const In& left, const In& right, int8_t cube_math_type, const Out* out = nullptr) {
  right.like(left.in(kFloats));
  if (out != nullptr) out->like(left);
  require(cube_math_type >= 0 && cube_math_type <= 3, kCubeMathType, "it must be 0 to 3");
}

at::Tensor wide(const at::Tensor& tensor) { return tensor.to(at::kFloat); }

at::Tensor product(const at::Tensor& left, const at::Tensor& right) {
  return at::matmul(wide(left), wide(right));
}

// A scaled sum in which a factor of zero drops its term, whatever it holds.
at::Tensor with_addend(const at::Tensor& addend, const Number& beta, const at::Tensor& product,
                       const Number& alpha) {
  const at::Tensor scaled = product * alpha;
  return beta.toDouble() == 0 ? scaled : scaled + wide(addend) * beta;
}

}  // namespace

OPERATOR(aclnnMm, (In self, In mat2, Out out, int8_t cubeMathType), {
  require_product(self.rank(2, 2), mat2.rank(2, 2), cubeMathType, &out);
  return [=] { out.set(product(self, mat2)); };
})
OPERATOR(aclnnMatmul, (In self, In mat2, Out out, int8_t cubeMathType), {
  require_product(self.rank(1, 6), mat2.rank(1, 6), cubeMathType, &out);
  return [=] { out.set(product(self, mat2)); };
})
OPERATOR(aclnnMatmulWeightNz, (In self, Weight mat2, Out out, int8_t cubeMathType), {
  require_product(self.rank(2, 6), mat2.rank(2, 6), cubeMathType, &out);
  self.in(kHalfs);
  return [=] { out.set(product(self, mat2.nd())); };
})
OPERATOR(aclnnBatchMatMul, (In self, In mat2, Out out, int8_t cubeMathType), {
  require_product(self.rank(3, 3), mat2.rank(3, 3), cubeMathType, &out);
  return [=] { out.set(product(self, mat2)); };
})
OPERATOR(aclnnAddmm, (In self, In mat1, In mat2, Number beta, Number alpha, Out out, int8_t cubeMathType), {
  require_product(mat1.rank(2, 2), mat2.rank(2, 2), cubeMathType);
  self.in(kFloats);
  return [=] { out.set(with_addend(self, beta, product(mat1, mat2), alpha)); };
})
OPERATOR(aclnnInplaceAddmm, (Out selfRef, In mat1, In mat2, Number beta, Number alpha, int8_t cubeMathType), {
  require_product(mat1.rank(2, 2), mat2.rank(2, 2), cubeMathType);
  also_reads(bytes_of(selfRef));
  return [=] { selfRef.set(with_addend(selfRef, beta, product(mat1, mat2), alpha)); };
})
OPERATOR(aclnnAddmmWeightNz,
         (In self, In mat1, Weight mat2, Number beta, Number alpha, Out out, int8_t cubeMathType), {
           require_product(mat1.rank(2, 2), mat2.rank(2, 2), cubeMathType);
           return [=] { out.set(with_addend(self, beta, product(mat1, mat2.nd()), alpha)); };
         })
OPERATOR(aclnnBaddbmm, (In self, In batch1, In batch2, Number beta, Number alpha, Out out, int8_t cubeMathType),
         {
           require_product(batch1.rank(3, 3), batch2.rank(3, 3), cubeMathType);
           self.in(kFloats);
           return [=] { out.set(with_addend(self, beta, product(batch1, batch2), alpha)); };
         })
OPERATOR(aclnnMv, (In self, In vec, Out out, int8_t cubeMathType), {
  require_product(self.rank(2, 2), vec.rank(1, 1), cubeMathType, &out);
  return [=] { out.set(product(self, vec)); };
})
OPERATOR(aclnnDot, (In self, In tensor, Out out), {
  tensor.like(self.in(kFloats).rank(1, 1)).rank(1, 1);
  return [=] { out.set(product(self, tensor)); };
})

// The matrices of each batch, permuted, times those of the weight; batches are the middle axis of the result.
OPERATOR(aclnnTransposeBatchMatMul,
         (In x1, In x2, Maybe bias, Maybe scale, Ints permX1, Ints permX2, Ints permY, int8_t cubeMathType,
          int32_t batchSplitFactor, Out out),
         {
           require_product(x1.rank(3, 3), x2.rank(3, 3), cubeMathType);
           require(!bias, "bias", "it is not supported");
           require(!scale, "scale", "quantised results are not supported");
           require(batchSplitFactor == 1, "batchSplitFactor", "only 1 is supported");
           const Ints plain{0, 1, 2}, heads_behind{1, 0, 2};
           require(permX1 == plain || permX1 == heads_behind, "permX1", "it must be (0, 1, 2) or (1, 0, 2)");
           require(permX2 == plain, "permX2", "only (0, 1, 2) is supported");
           require(permY == heads_behind, "permY", "it must be (1, 0, 2)");
           for (const int64_t axis : {1, 2}) {
             const int64_t size = x2.size(axis);
             require(size % 16 == 0 && size < 65536, x2.name,
                     "axis " + std::to_string(axis) + " of " + std::to_string(size) +
                         " must be a multiple of 16 below 65536");
           }
           return [=] {
             const auto order = [](const at::Tensor& tensor, const Ints& axes) { return tensor.permute(axes); };
             out.set(order(product(order(x1, permX1), order(x2, permX2)), permY));
           };
         })
