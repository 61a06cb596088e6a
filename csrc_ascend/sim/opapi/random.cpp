// Random numbers. A seed and an offset name a stream of numbers: the same pair gives the same numbers again,
// and the caller's generator moves its offset on with every call. The numbers differ from those of a chip.
#include <ATen/CPUGeneratorImpl.h>

#include "sim/opapi/table.h"

using namespace ascend_sim;

namespace {

at::Generator generator(int64_t seed, int64_t offset) {
  // Mixed, because neighbouring seeds of the underlying generator start alike (the constants of splitmix64).
  uint64_t state = static_cast<uint64_t>(seed) * 0x9E3779B97F4A7C15ULL + static_cast<uint64_t>(offset);
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ULL;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EBULL;
  return at::make_generator<at::CPUGeneratorImpl>(state ^ (state >> 31));
}

// In a graph, seed and offset are tensors that every replay brings up to date.
at::Generator generator(const In& seed, const In& offset, int64_t extra) {
  return generator(seed.item<int64_t>(), offset.item<int64_t>() + extra);
}

void require_state(const In& seed, const In& offset) {
  require(seed.in({at::kLong}).numel() == 1, seed.name, "it must have one element");
  require(offset.in({at::kLong}).numel() == 1, offset.name, "it must have one element");
}

void require_draw(const In& self, int64_t count, bool replacement) {
  self.in(kFloatsAndDouble).rank(1, 2);
  require(count > 0, "numsamples", "it must be positive");
  require(replacement || count <= self.size(-1), "numsamples", "there are fewer categories than samples");
}

}  // namespace

OPERATOR(aclnnInplaceUniform, (Out selfRef, double from, double to, uint64_t seed, uint64_t offset), {
  require(from <= to, "from", "it exceeds to");
  return [=] { selfRef.uniform_(from, to, generator(seed, offset)); };
})
OPERATOR(aclnnInplaceUniformTensor,
         (Out selfRef, double from, double to, In seedTensor, In offsetTensor, uint64_t offset), {
           require_state(seedTensor, offsetTensor);
           return [=] { selfRef.uniform_(from, to, generator(seedTensor, offsetTensor, offset)); };
         })
OPERATOR(aclnnInplaceNormal, (Out selfRef, float mean, float std, int64_t seed, int64_t offset), {
  require(std >= 0, "std", "it must not be negative");
  return [=] { selfRef.normal_(mean, std, generator(seed, offset)); };
})
OPERATOR(aclnnInplaceNormalTensor,
         (Out selfRef, float mean, float std, In seedTensor, In offsetTensor, int64_t offset), {
           require_state(seedTensor, offsetTensor);
           return [=] { selfRef.normal_(mean, std, generator(seedTensor, offsetTensor, offset)); };
         })
OPERATOR(aclnnInplaceRandom, (Out selfRef, int64_t from, int64_t to, int64_t seed, int64_t offset), {
  require(from < to, "from", "it must be below to");
  return [=] { selfRef.random_(from, to, generator(seed, offset)); };
})
OPERATOR(aclnnInplaceRandomTensor,
         (Out selfRef, int64_t from, int64_t to, In seedTensor, In offsetTensor, int64_t offset), {
           require_state(seedTensor, offsetTensor);
           return [=] { selfRef.random_(from, to, generator(seedTensor, offsetTensor, offset)); };
         })
OPERATOR(aclnnInplaceBernoulli, (Out selfRef, Number prob, int64_t seed, int64_t offset),
         { return [=] { selfRef.bernoulli_(prob.toDouble(), generator(seed, offset)); }; })
OPERATOR(aclnnInplaceBernoulliTensor, (Out selfRef, In prob, int64_t seed, int64_t offset),
         { return [=] { selfRef.bernoulli_(prob, generator(seed, offset)); }; })
OPERATOR(aclnnSimThreadExponential, (Out selfRef, int64_t count, double lambd, int64_t seed, int64_t offset), {
  require(count == selfRef.numel(), "count", "it must be the number of elements");
  require(lambd > 0, "lambda", "it must be positive");
  return [=] { selfRef.exponential_(lambd, generator(seed, offset)); };
})
OPERATOR(aclnnMultinomial,
         (In self, int64_t numsamples, bool replacement, int64_t seed, int64_t offset, Out out), {
           require_draw(self, numsamples, replacement);
           return [=] { out.set(at::multinomial(self, numsamples, replacement, generator(seed, offset))); };
         })
OPERATOR(aclnnRandperm, (int64_t n, int64_t seed, int64_t offset, Out out), {
  return [=] { out.set(at::randperm(n, generator(seed, offset), at::TensorOptions().dtype(at::kLong))); };
})
