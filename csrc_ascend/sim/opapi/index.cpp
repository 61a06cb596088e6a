// Gathering and scattering by index, joining, splitting, repeating and reordering.
#include "sim/opapi/table.h"

using namespace ascend_sim;

namespace {

// Only the elements that indices pick are read, or written.
void costs_of_picking(int64_t index_bytes, const In& out) {
  costs({index_bytes + bytes_of(out), bytes_of(out)});
}
void costs_of_placing(int64_t index_bytes, const In& source) {
  costs({index_bytes + bytes_of(source), bytes_of(source)});
}

int64_t bytes_of_all(const MaybeList& indices) {
  int64_t sum = 0;
  for (const Maybe& index : indices) sum += index ? bytes_of(*index) : 0;
  return sum;
}

// Indices must lie within a dimension of `size` elements; negative ones count from its end where that is
// allowed.
at::Tensor checked_index(const In& index, int64_t size, bool negative) {
  const at::Tensor wide = index.to(at::kLong);
  if (wide.numel()) {
    const int64_t low = wide.min().item<int64_t>(), high = wide.max().item<int64_t>();
    require(low >= (negative ? -size : 0) && high < size, index.name,
            "values " + std::to_string(low) + " to " + std::to_string(high) + " leave the dimension of " +
                std::to_string(size));
  }
  return wide;
}

// Torch's list of indices: an absent one (or an empty one, if the result is not empty) takes the whole
// dimension.
c10::List<std::optional<at::Tensor>> index_list(const at::Tensor& self, const MaybeList& indices,
                                                bool empty_result) {
  c10::List<std::optional<at::Tensor>> list;
  int64_t dim = 0;
  for (const Maybe& index : indices) {
    if (!index || (index->numel() == 0 && !empty_result)) {
      list.push_back(std::nullopt);
      ++dim;
    } else if (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte) {
      list.push_back(std::optional<at::Tensor>(*index));
      dim += index->dim();
    } else {
      list.push_back(std::optional<at::Tensor>(checked_index(*index, self.size(dim++), true)));
    }
  }
  return list;
}

void require_index_dtypes(const MaybeList& indices) {
  for (const Maybe& index : indices) {
    if (index && index->numel()) index->in({at::kInt, at::kLong, at::kBool, at::kByte});
  }
}

at::Tensor scattered(const In& self, int64_t dim, const In& index, const at::Tensor& source, int64_t reduce) {
  const at::Tensor positions = checked_index(index, self.dim() ? self.size(dim) : 1, true);
  if (reduce == 0) return at::scatter(self, dim, positions, source);
  return at::scatter(self, dim, positions, source, reduce == 1 ? "add" : "multiply");
}

at::Tensor scattered(const In& self, int64_t dim, const In& index, const Number& value, int64_t reduce) {
  const at::Tensor positions = checked_index(index, self.dim() ? self.size(dim) : 1, true);
  if (reduce == 0) return at::scatter(self, dim, positions, value);
  return at::scatter(self, dim, positions, value, reduce == 1 ? "add" : "multiply");
}

void require_scatter(const In& index, int64_t reduce) {
  index.in(kIndices);
  require(reduce >= 0 && reduce <= 2, "reduce", "it must be 0 (none), 1 (add) or 2 (multiply)");
}

std::vector<at::Tensor> tensors_of(const InList& list) { return {list.begin(), list.end()}; }

}  // namespace

OPERATOR(aclnnIndex, (In self, MaybeList indices, Out out), {
  require_index_dtypes(indices);
  costs_of_picking(bytes_of_all(indices), out);
  return [=] { out.set(at::index(self, index_list(self, indices, out.numel() == 0))); };
})
OPERATOR(aclnnIndexPutImpl, (Out selfRef, MaybeList indices, In values, bool accumulate, bool unsafe), {
  require_index_dtypes(indices);
  values.like(selfRef);
  costs_of_placing(bytes_of_all(indices), values);
  return [=] {
    if (values.numel()) selfRef.index_put_(index_list(selfRef, indices, false), values, accumulate);
  };
})
OPERATOR(aclnnIndexSelect, (In self, int64_t dim, In index, Out out), {
  index.in(kIndices).rank(0, 1);
  costs_of_picking(bytes_of(index), out);
  return [=] { out.set(at::index_select(self, dim, checked_index(index, self.size(dim), false))); };
})
OPERATOR(aclnnEmbedding, (In weight, In indices, Out out), {
  indices.in(kIndices);
  weight.rank(2, 2);
  costs_of_picking(bytes_of(indices), out);
  return [=] { out.set(at::embedding(weight, checked_index(indices, weight.size(0), false))); };
})
OPERATOR(aclnnGather, (In self, int64_t dim, In index, Out out), {
  index.in(kIndices);
  costs_of_picking(bytes_of(index), out);
  return [=] { out.set(at::gather(self, dim, checked_index(index, self.dim() ? self.size(dim) : 1, true))); };
})
OPERATOR(aclnnTake, (In self, In index, Out out), {
  index.in(kIndices);
  costs_of_picking(bytes_of(index), out);
  return [=] { out.set(at::take(self, checked_index(index, self.numel(), true))); };
})

OPERATOR(aclnnScatter, (In self, int64_t dim, In index, In src, int64_t reduce, Out out), {
  require_scatter(index, reduce);
  src.like(self);
  return [=] { out.set(scattered(self, dim, index, src, reduce)); };
})
OPERATOR(aclnnInplaceScatter, (Out selfRef, int64_t dim, In index, In src, int64_t reduce), {
  require_scatter(index, reduce);
  src.like(selfRef);
  costs_of_placing(bytes_of(index), src);
  return [=] { selfRef.set(scattered(selfRef, dim, index, src, reduce)); };
})
OPERATOR(aclnnScatterValue, (In self, int64_t dim, In index, Number value, int64_t reduce, Out out), {
  require_scatter(index, reduce);
  return [=] { out.set(scattered(self, dim, index, value, reduce)); };
})
OPERATOR(aclnnInplaceScatterValue, (Out selfRef, int64_t dim, In index, Number value, int64_t reduce), {
  require_scatter(index, reduce);
  costs({bytes_of(index), index.numel() * static_cast<int64_t>(selfRef.element_size())});
  return [=] { selfRef.set(scattered(selfRef, dim, index, value, reduce)); };
})
OPERATOR(aclnnScatterAdd, (In self, int64_t dim, In index, In src, Out out), {
  require_scatter(index, 1);
  src.like(self);
  return [=] { out.set(scattered(self, dim, index, src, 1)); };
})
OPERATOR(aclnnIndexAdd, (In self, int64_t dim, In index, In source, Number alpha, Out out), {
  index.in(kIndices).rank(0, 1);
  source.like(self);
  return [=] { out.set(at::index_add(self, dim, checked_index(index, self.size(dim), false), source, alpha)); };
})
OPERATOR(aclnnIndexCopy, (In self, int64_t dim, In index, In source, Out out), {
  index.in(kIndices).rank(0, 1);
  source.like(self);
  return [=] { out.set(at::index_copy(self, dim, checked_index(index, self.size(dim), false), source)); };
})
OPERATOR(aclnnInplaceIndexCopy, (Out selfRef, int64_t dim, In index, In source), {
  index.in(kIndices).rank(0, 1);
  source.like(selfRef);
  costs_of_placing(bytes_of(index), source);
  if (dim != 0) {
    // along another dimension CANN transposes the whole tensor, scatters, transposes it back and copies it
    const int64_t whole = bytes_of(selfRef), placed = bytes_of(source);
    costs({3 * whole + placed, 3 * whole + placed, 2 * whole});
  }
  return [=] {
    selfRef.set(at::index_copy(selfRef, dim, checked_index(index, selfRef.size(dim), false), source));
  };
})
// The positions come as numbers, not as a tensor.
OPERATOR(aclnnIndexFillTensor, (In self, int64_t dim, Ints index, Number value, Out out),
         { return [=] { out.set(at::index_fill(self, dim, at::tensor(index), value)); }; })
OPERATOR(aclnnInplaceIndexFillTensor, (Out selfRef, int64_t dim, Ints index, Number value),
         { return [=] { selfRef.set(at::index_fill(selfRef, dim, at::tensor(index), value)); }; })

OPERATOR(aclnnOneHot, (In self, int64_t numClasses, In onValue, In offValue, int64_t axis, Out out), {
  self.in(kIndices);
  require(axis == -1 || axis == self.dim(), "axis", "only the last one is supported");
  return [=] {
    const at::Tensor hot = self.unsqueeze(-1).eq(at::arange(numClasses));
    out.set(at::where(hot, onValue.reshape({}), offValue.reshape({})));
  };
})
// The positions of values that are not zero: one row each, or one column each in the second form.
OPERATOR(aclnnNonzero, (In self, Out out), { return [=] { out.set_front(at::nonzero(self)); }; })
OPERATOR(aclnnNonzeroV2, (In self, Out out),
         { return [=] { out.set_front(at::nonzero(self).t().contiguous()); }; })
OPERATOR(aclnnUnique2,
         (In self, bool sorted, bool returnInverse, bool returnCounts, Out valueOut, Out inverseOut,
          Out countsOut),
         {
           return [=] {
             const auto [values, inverse, counts] = at::_unique2(self, sorted, returnInverse, returnCounts);
             valueOut.set_front(values);
             if (returnInverse || returnCounts) inverseOut.set_front(inverse);
             if (returnCounts) countsOut.set_front(counts);
           };
         })
OPERATOR(aclnnIsInTensorScalar, (In element, Number testElement, bool assumeUnique, bool invert, Out out),
         { return [=] { out.set(at::isin(element, testElement, assumeUnique, invert)); }; })
OPERATOR(aclnnIsInScalarTensor, (Number element, In testElements, bool assumeUnique, bool invert, Out out),
         { return [=] { out.set(at::isin(element, testElements, assumeUnique, invert)); }; })
OPERATOR(aclnnSearchSorted, (In sortedSequence, In self, bool outInt32, bool right, Maybe sorter, Out out), {
  return [=] {
    out.set(at::searchsorted(sortedSequence, self, outInt32, right, std::nullopt,
                             sorter ? std::optional<at::Tensor>(*sorter) : std::nullopt));
  };
})
OPERATOR(aclnnCat, (InList tensors, int64_t dim, Out out), {
  require(!tensors.empty(), "tensors", "the list is empty");
  return [=] { out.set(at::cat(tensors_of(tensors), dim)); };
})
OPERATOR(aclnnStack, (InList tensors, int64_t dim, Out out), {
  require(!tensors.empty(), "tensors", "the list is empty");
  return [=] { out.set(at::stack(tensors_of(tensors), dim)); };
})
OPERATOR(aclnnRepeat, (In self, Ints repeats, Out out), { return [=] { out.set(self.repeat(repeats)); }; })
OPERATOR(aclnnRepeatInterleave, (In self, In repeats, int64_t outputSize, Out out), {
  repeats.in(kIndices);
  return [=] { out.set(at::repeat_interleave(self.flatten(), repeats.to(at::kLong), 0, outputSize)); };
})
OPERATOR(aclnnRepeatInterleaveWithDim, (In self, In repeats, int64_t dim, int64_t outputSize, Out out), {
  repeats.in(kIndices);
  return [=] { out.set(at::repeat_interleave(self, repeats.to(at::kLong), dim, outputSize)); };
})
OPERATOR(aclnnRepeatInterleaveInt, (In self, int64_t repeats, int64_t outputSize, Out out),
         { return [=] { out.set(at::repeat_interleave(self.flatten(), repeats, 0, outputSize)); }; })
OPERATOR(aclnnRepeatInterleaveIntWithDim, (In self, int64_t repeats, int64_t dim, int64_t outputSize, Out out),
         { return [=] { out.set(at::repeat_interleave(self, repeats, dim, outputSize)); }; })
OPERATOR(aclnnRepeatInterleaveTensor, (In repeats, int64_t outputSize, Out out), {
  repeats.in(kIndices);
  return [=] { out.set(at::repeat_interleave(repeats.to(at::kLong), std::optional<int64_t>(outputSize))); };
})
OPERATOR(aclnnFlip, (In self, Ints dims, Out out), { return [=] { out.set(at::flip(self, dims)); }; })
OPERATOR(aclnnRoll, (In self, Ints shifts, Ints dims, Out out),
         { return [=] { out.set(at::roll(self, shifts, dims)); }; })
OPERATOR(aclnnTriu, (In self, int64_t diagonal, Out out),
         { return [=] { out.set(at::triu(self, diagonal)); }; })
OPERATOR(aclnnTril, (In self, int64_t diagonal, Out out),
         { return [=] { out.set(at::tril(self, diagonal)); }; })
OPERATOR(aclnnInplaceTriu, (Out self, int64_t diagonal),
         { return [=] { self.set(at::triu(self, diagonal)); }; })
OPERATOR(aclnnInplaceTril, (Out self, int64_t diagonal),
         { return [=] { self.set(at::tril(self, diagonal)); }; })
OPERATOR(aclnnConstantPadNd, (In self, Ints pad, Number value, Out out),
         { return [=] { out.set(at::constant_pad_nd(self, pad, value)); }; })
