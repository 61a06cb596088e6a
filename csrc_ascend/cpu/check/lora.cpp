// Products with LoRA adapters.
#include "cpu/kernels/lora.h"

#include "cpu/check/check.h"
#include "cpu/team.h"

namespace ascend_vllm::check {
namespace {

constexpr double kSingle = 0x1p-24;
constexpr int64_t kRows = 9, kSlots = 2, kSlices = 2, kMaxRank = 32, kPanels = kMaxRank / kLoraPanel;
constexpr int32_t kRanks[kSlots] = {5, 32};
// rows 2 and 5 have no adapter
const LoraBlock kBlocks[] = {{0, 6, {0, 1, 3, 6, 7, 8}}, {1, 1, {4}}};

template <class Body>
void for_rows(const Body& body) {
  for (const LoraBlock& block : kBlocks) {
    for (int32_t r = 0; r < block.count; ++r) body(int64_t{block.slot}, int64_t{block.rows[r]});
  }
}

ASCEND_VLLM_CHECK(lora_shrink) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const int64_t inputs : {1, 33, 130}) {
      Random random(inputs);
      const int64_t stride = inputs + 3, width = kPanels * kLoraPanel;
      const auto x = numbers<T>(random, kRows * stride);
      const auto weights = numbers<T>(random, kSlots * kSlices * kPanels * inputs * kLoraPanel);
      std::vector<float> out(kRows * kSlices * width), scratch(team_threads() * kLoraRows * inputs);
      lora_shrink_kernel({kDType<T>, kDType<T>, x.data(), weights.data(), kBlocks, kRanks, out.data(),
                          scratch.data(), 2, stride, inputs, kSlices, kPanels});
      Case own("lora_shrink", shape_of<T>({inputs}));
      for_rows([&](int64_t slot, int64_t row) {
        for (int64_t at = 0; at < kSlices * kRanks[slot]; ++at) {
          const int64_t slice = at / kRanks[slot], rank = at % kRanks[slot];
          const T* panel =
              weights.data() + (((slot * kSlices + slice) * kPanels + rank / kLoraPanel) * inputs) * kLoraPanel;
          double sum = 0.0, size = 0.0;
          for (int64_t k = 0; k < inputs; ++k) {
            const double part =
                double{to_float(x[row * stride + k])} * to_float(panel[k * kLoraPanel + rank % kLoraPanel]);
            sum += part;
            size += std::abs(part);
          }
          const int64_t place = (row * kSlices + slice) * width + rank;
          own.near(out[place], sum, static_cast<double>(inputs) * kSingle * size, place);
        }
      });
    }
  });
}

ASCEND_VLLM_CHECK(lora_look_up) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    constexpr int64_t kEntries = 9;
    const int64_t indices[kRows] = {3, 0, 8, 8, 1, 2, 5, 7, 4};
    const int32_t adapters[kRows] = {0, 0, -1, 0, 1, -1, 0, 0, 0};
    Random random(1);
    const auto tables = numbers<T>(random, kSlots * kEntries * kMaxRank);
    std::vector<float> out(kRows * kMaxRank);
    lora_look_up_kernel(
        {kDType<T>, tables.data(), indices, adapters, kRanks, out.data(), kRows, kEntries, kMaxRank});
    Case own("lora_look_up", shape_of<T>({kEntries}));
    for_rows([&](int64_t slot, int64_t row) {
      for (int64_t rank = 0; rank < kRanks[slot]; ++rank) {
        const double want = to_float(tables[(slot * kEntries + indices[row]) * kMaxRank + rank]);
        own.near(out[row * kMaxRank + rank], want, 0.0, row * kMaxRank + rank);
      }
    });
  });
}

ASCEND_VLLM_CHECK(lora_expand) {
  for_dtypes([](auto tag) {
    using T = decltype(tag);
    for (const int64_t first : {1, 17, 48}) {
      Random random(first);
      const int64_t widths[kSlices] = {first, 5}, columns = first + 5, stride = columns + 2;
      const int64_t first_panels = (first + kLoraPanel - 1) / kLoraPanel, panels = first_panels + 1;
      const auto x = numbers<float>(random, kRows * kSlices * kMaxRank);
      const auto weights = numbers<T>(random, kSlots * panels * kMaxRank * kLoraPanel);
      const auto before = numbers<T>(random, kRows * stride);
      std::vector<T> y = before;
      lora_expand_kernel({kDType<T>, kDType<T>, x.data(), weights.data(), kBlocks, kRanks, widths, y.data(), 2,
                          stride, kSlices, panels, kMaxRank});
      Case own("lora_expand", shape_of<T>({first}));
      std::vector<double> want(y.size()), slack(y.size(), 0.0);
      for (size_t i = 0; i < y.size(); ++i) want[i] = to_float(before[i]);
      for_rows([&](int64_t slot, int64_t row) {
        for (int64_t column = 0; column < columns; ++column) {
          const int64_t slice = column < first ? 0 : 1, own_column = column - slice * first;
          const int64_t panel = slice * first_panels + own_column / kLoraPanel, at = row * stride + column;
          double size = std::abs(want[at]);
          for (int64_t k = 0; k < kRanks[slot]; ++k) {
            const double part =
                double{x[(row * kSlices + slice) * kMaxRank + k]} *
                to_float(
                    weights[((slot * panels + panel) * kMaxRank + k) * kLoraPanel + own_column % kLoraPanel]);
            want[at] += part;
            size += std::abs(part);
          }
          slack[at] = (kMaxRank + 1) * kSingle * size;
        }
      });
      for (size_t i = 0; i < y.size(); ++i) own.near(y[i], want[i], slack[i], static_cast<int64_t>(i));
    }
  });
}

}  // namespace
}  // namespace ascend_vllm::check
