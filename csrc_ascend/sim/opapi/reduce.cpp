// Reductions, running sums, softmax and ordering.
#include "sim/opapi/table.h"

using namespace ascend_sim;

namespace {

// The interface names all dimensions where torch names none.
at::OptionalIntArrayRef dims_of(const Ints& dims) {
  return dims.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(dims);
}

at::Tensor all_of(const at::Tensor& self, const Ints& dims, bool keep_dim) {
  return dims.empty() ? at::all(self) : at::all(self, at::IntArrayRef(dims), keep_dim);
}

at::Tensor any_of(const at::Tensor& self, const Ints& dims, bool keep_dim) {
  return dims.empty() ? at::any(self) : at::any(self, at::IntArrayRef(dims), keep_dim);
}

void require_reduced_dtype(const Dtype& dtype, const Out& out) {
  require(dtype.type == out.scalar_type(), "dtype", "it differs from the dtype of out");
}

void set_both(const std::tuple<at::Tensor, at::Tensor>& results, const Out& first, const Out& second) {
  first.set(std::get<0>(results));
  second.set(std::get<1>(results));
}

}  // namespace

OPERATOR(aclnnReduceSum, (In self, Ints dims, bool keepDims, Dtype dtype, Out out), {
  require_reduced_dtype(dtype, out);
  return [=] { out.set(at::sum(self, dims_of(dims), keepDims, dtype.type)); };
})
OPERATOR(aclnnMean, (In self, Ints dim, bool keepDim, Dtype dtype, Out out), {
  require_reduced_dtype(dtype, out);
  return [=] { out.set(at::mean(self, dims_of(dim), keepDim, dtype.type)); };
})
OPERATOR(aclnnProd, (In self, Dtype dtype, Out out), { return [=] { out.set(at::prod(self, dtype.type)); }; })
OPERATOR(aclnnProdDim, (In self, int64_t dim, bool keepDim, Dtype dtype, Out out),
         { return [=] { out.set(at::prod(self, dim, keepDim, dtype.type)); }; })
OPERATOR(aclnnAmax, (In self, Ints dim, bool keepDim, Out out),
         { return [=] { out.set(at::amax(self, dim, keepDim)); }; })
OPERATOR(aclnnAmin, (In self, Ints dim, bool keepDim, Out out),
         { return [=] { out.set(at::amin(self, dim, keepDim)); }; })
OPERATOR(aclnnMax, (In self, Out out), { return [=] { out.set(at::max(self)); }; })
OPERATOR(aclnnMin, (In self, Out out), { return [=] { out.set(at::min(self)); }; })
OPERATOR(aclnnMaxDim, (In self, int64_t dim, bool keepdim, Out out, Out indices), {
  indices.in(kIndices);
  return [=] { set_both(at::max(self, dim, keepdim), out, indices); };
})
OPERATOR(aclnnMinDim, (In self, int64_t dim, bool keepdim, Out out, Out indices), {
  indices.in(kIndices);
  return [=] { set_both(at::min(self, dim, keepdim), out, indices); };
})
OPERATOR(aclnnArgMax, (In self, int64_t dim, bool keepdim, Out out), {
  out.in(kIndices);
  return [=] { out.set(at::argmax(self, dim, keepdim)); };
})
OPERATOR(aclnnArgMin, (In self, int64_t dim, bool keepdim, Out out), {
  out.in(kIndices);
  return [=] { out.set(at::argmin(self, dim, keepdim)); };
})
OPERATOR(aclnnAll, (In self, Ints dim, bool keepdim, Out out),
         { return [=] { out.set(all_of(self, dim, keepdim).view(out.sizes())); }; })
OPERATOR(aclnnAny, (In self, Ints dim, bool keepdim, Out out),
         { return [=] { out.set(any_of(self, dim, keepdim).view(out.sizes())); }; })
OPERATOR(aclnnLogSumExp, (In self, Ints dim, bool keepDim, Out out), {
  self.in(kReal);
  return [=] { out.set(at::logsumexp(self, dim, keepDim)); };
})
OPERATOR(aclnnLinalgVectorNorm, (In self, Number ord, Ints dims, bool keepDims, Dtype dtype, Out out), {
  self.in(kFloats);
  require_reduced_dtype(dtype, out);
  return [=] { out.set(at::norm(self, at::Scalar(ord), dims, keepDims, dtype.type)); };
})
OPERATOR(aclnnStd, (In self, Ints dim, int64_t correction, bool keepdim, Out out), {
  self.in(kFloats);
  return [=] { out.set(at::std(self, dims_of(dim), at::Scalar(correction), keepdim)); };
})
OPERATOR(aclnnVarCorrection, (In self, Ints dim, int64_t correction, bool keepdim, Out out), {
  self.in(kFloats);
  return [=] { out.set(at::var(self, dims_of(dim), at::Scalar(correction), keepdim)); };
})
OPERATOR(aclnnVarMean, (In self, Ints dim, int64_t correction, bool keepdim, Out varOut, Out meanOut), {
  self.in(kFloats);
  return [=] { set_both(at::var_mean(self, dims_of(dim), at::Scalar(correction), keepdim), varOut, meanOut); };
})

OPERATOR(aclnnCumsum, (In self, int64_t dim, Dtype dtype, Out out), {
  require_reduced_dtype(dtype, out);
  return [=] { out.set(at::cumsum(self, dim, dtype.type)); };
})
OPERATOR(aclnnCumprod, (In self, Number dim, Dtype dtype, Out out),
         { return [=] { out.set(at::cumprod(self, dim.toLong(), dtype.type)); }; })
OPERATOR(aclnnCummax, (In self, int64_t dim, Out valuesOut, Out indicesOut),
         { return [=] { set_both(at::cummax(self, dim), valuesOut, indicesOut); }; })
OPERATOR(aclnnCummin, (In self, int64_t dim, Out valuesOut, Out indicesOut),
         { return [=] { set_both(at::cummin(self, dim), valuesOut, indicesOut); }; })

OPERATOR(aclnnSoftmax, (In self, int64_t dim, Out out), {
  self.in(kFloatsAndDouble);
  return [=] { out.set(at::softmax(self, dim, out.scalar_type())); };
})
OPERATOR(aclnnLogSoftmax, (In self, int64_t dim, Out out), {
  self.in(kFloatsAndDouble);
  return [=] { out.set(at::log_softmax(self, dim, out.scalar_type())); };
})

OPERATOR(aclnnSort, (In self, bool stable, int64_t dim, bool descending, Out valuesOut, Out indicesOut), {
  valuesOut.like(self);
  indicesOut.in({at::kLong});
  return [=] { set_both(at::sort(self, stable, dim, descending), valuesOut, indicesOut); };
})
OPERATOR(aclnnTopk, (In self, int64_t k, int64_t dim, bool largest, bool sorted, Out valuesOut, Out indicesOut),
         {
           valuesOut.like(self);
           indicesOut.in({at::kLong});
           return [=] { set_both(at::topk(self, k, dim, largest, sorted), valuesOut, indicesOut); };
         })
OPERATOR(aclnnKthvalue, (In self, int64_t k, int64_t dim, bool keepdim, Out valuesOut, Out indicesOut), {
  valuesOut.like(self);
  indicesOut.in({at::kLong});
  return [=] { set_both(at::kthvalue(self, k, dim, keepdim), valuesOut, indicesOut); };
})
OPERATOR(aclnnMedianDim, (In self, int64_t dim, bool keepDim, Out valuesOut, Out indicesOut),
         { return [=] { set_both(at::median(self, dim, keepDim), valuesOut, indicesOut); }; })

OPERATOR(aclnnBincount, (In self, Maybe weights, int64_t minlength, Out out), {
  self.in(kInts).rank(1, 1);
  return [=] {
    out.set(at::bincount(self, weights ? std::optional<at::Tensor>(*weights) : std::nullopt, minlength));
  };
})
