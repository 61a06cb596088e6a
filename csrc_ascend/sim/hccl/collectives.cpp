// Collectives. Data is exchanged through one slot of shared memory per rank, in as many rounds as needed.
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "sim/hccl/entry.h"
#include "sim/opapi/aten.h"

using namespace ascend_sim;
using namespace ascend_sim::hccl;

namespace {

using Pointers = std::vector<const char*>;
// Called once per round with the offset in the data and the slots of all ranks.
using Visit = std::function<void(size_t offset, const Pointers& from)>;

size_t round_bytes(size_t room) { return room / 8 * 8; }

size_t part_of(size_t bytes, size_t offset, size_t room) {
  return offset < bytes ? std::min(room, bytes - offset) : 0;
}

// Every rank sends `bytes[rank]` bytes to all.
void share(Communicator& c, const char* data, const std::vector<size_t>& bytes, const Visit& visit) {
  const size_t longest = *std::max_element(bytes.begin(), bytes.end());
  Pointers from(c.ranks());
  for (uint32_t r = 0; r < c.ranks(); ++r) from[r] = c.slot(r);
  for (size_t offset = 0; offset < longest; offset += kSlotBytes) {
    if (const size_t part = part_of(bytes[c.rank()], offset, kSlotBytes))
      std::memcpy(c.slot(c.rank()), data + offset, part);
    c.barrier();
    visit(offset, from);
    c.barrier();
  }
}

// Every rank sends `bytes[rank][to]` bytes at `data[to]` to every other; `from[r]` is what rank r has for this
// one.
void exchange(Communicator& c, const Pointers& data, const std::vector<std::vector<size_t>>& bytes,
              const Visit& visit) {
  const size_t room = round_bytes(kSlotBytes / c.ranks());
  size_t longest = 0;
  for (const auto& row : bytes) longest = std::max(longest, *std::max_element(row.begin(), row.end()));
  Pointers from(c.ranks());
  for (uint32_t r = 0; r < c.ranks(); ++r) from[r] = c.slot(r) + c.rank() * room;
  for (size_t offset = 0; offset < longest; offset += room) {
    for (uint32_t to = 0; to < c.ranks(); ++to) {
      const size_t part = part_of(bytes[c.rank()][to], offset, room);
      if (part) std::memcpy(c.slot(c.rank()) + to * room, data[to] + offset, part);
    }
    c.barrier();
    visit(offset, from);
    c.barrier();
  }
}

at::ScalarType torch_type(HcclDataType dtype) {
  switch (dtype) {
    case HCCL_DATA_TYPE_INT8:
      return at::kChar;
    case HCCL_DATA_TYPE_INT16:
      return at::kShort;
    case HCCL_DATA_TYPE_INT32:
      return at::kInt;
    case HCCL_DATA_TYPE_INT64:
      return at::kLong;
    case HCCL_DATA_TYPE_FP16:
      return at::kHalf;
    case HCCL_DATA_TYPE_BFP16:
      return at::kBFloat16;
    default:
      return at::kFloat;
  }
}

// The documented types of reductions on these chips.
void require_reduction(const char* function, HcclDataType dtype, HcclReduceOp op) {
  const bool wide = dtype == HCCL_DATA_TYPE_INT8 || dtype == HCCL_DATA_TYPE_INT32 ||
                    dtype == HCCL_DATA_TYPE_INT64 || dtype == HCCL_DATA_TYPE_FP16 ||
                    dtype == HCCL_DATA_TYPE_FP32;
  const bool narrow = dtype == HCCL_DATA_TYPE_INT16 || dtype == HCCL_DATA_TYPE_BFP16;
  require(wide || narrow, function, "dataType", "number " + std::to_string(dtype) + " is not supported");
  require(op >= HCCL_REDUCE_SUM && op <= HCCL_REDUCE_MIN, function, "op", "it must be sum, prod, max or min");
  require(op != HCCL_REDUCE_PROD || wide, function, "op", "prod does not support int16 and bfloat16");
}

at::Tensor combine(HcclReduceOp op, const at::Tensor& left, const at::Tensor& right) {
  switch (op) {
    case HCCL_REDUCE_SUM:
      return left + right;
    case HCCL_REDUCE_PROD:
      return left * right;
    case HCCL_REDUCE_MAX:
      return at::maximum(left, right);
    default:
      return at::minimum(left, right);
  }
}

// All ranks reduce in rank order, in the data's own type, so their results are bitwise equal.
void reduce(const Pointers& from, size_t bytes, HcclDataType dtype, HcclReduceOp op, char* result) {
  const c10::InferenceMode guard(true);
  const auto options = at::TensorOptions().dtype(torch_type(dtype));
  const auto view = [&](const char* data) {
    return at::from_blob(const_cast<char*>(data), {static_cast<int64_t>(bytes / element_size(dtype))}, options);
  };
  at::Tensor sum = view(from[0]).clone();
  for (size_t r = 1; r < from.size(); ++r) sum = combine(op, sum, view(from[r]));
  std::memcpy(result, sum.const_data_ptr(), bytes);
}

const char* bytes_at(const void* buffer, size_t offset) { return static_cast<const char*>(buffer) + offset; }
char* bytes_at(void* buffer, size_t offset) { return static_cast<char*>(buffer) + offset; }

std::vector<size_t> equal_bytes(const Communicator& c, size_t bytes) {
  return std::vector<size_t>(c.ranks(), bytes);
}

// Sizes and offsets of the parts for (or from) every rank, in bytes.
struct Parts {
  std::vector<size_t> bytes, offsets;
};

Parts parts_of(const Communicator& c, const void* counts, const void* displacements, HcclDataType dtype) {
  Parts parts;
  for (uint32_t r = 0; r < c.ranks(); ++r) {
    parts.bytes.push_back(static_cast<const uint64_t*>(counts)[r] * element_size(dtype));
    parts.offsets.push_back(static_cast<const uint64_t*>(displacements)[r] * element_size(dtype));
  }
  return parts;
}

Parts equal_parts(const Communicator& c, size_t bytes) {
  Parts parts;
  for (uint32_t r = 0; r < c.ranks(); ++r) {
    parts.bytes.push_back(bytes);
    parts.offsets.push_back(r * bytes);
  }
  return parts;
}

void require_parts(const char* function, const char* argument, const void* buffer, const Parts& parts,
                   HcclDataType dtype) {
  for (size_t r = 0; r < parts.bytes.size(); ++r) {
    require_buffer(function, argument, bytes_at(buffer, parts.offsets[r]), parts.bytes[r] / element_size(dtype),
                   dtype);
  }
}

void all_to_all(const char* function, Handle c, const void* send, Parts out, void* receive, Parts in,
                HcclDataType dtype, aclrtStream stream) {
  require_parts(function, "sendBuf", send, out, dtype);
  require_parts(function, "recvBuf", receive, in, dtype);
  submit(stream, function, [=] {
    Call call = call_of(function, dtype, 0);
    std::copy(out.bytes.begin(), out.bytes.end(), call.counts.begin());
    c->collective(call, [&] {
      std::vector<std::vector<size_t>> bytes;
      for (uint32_t r = 0; r < c->ranks(); ++r) {
        const auto& counts = c->call_of(r).counts;
        bytes.emplace_back(counts.begin(), counts.begin() + c->ranks());
        require(bytes[r][c->rank()] == in.bytes[r], function, "recvCounts",
                std::to_string(in.bytes[r]) + " bytes are expected of rank " + std::to_string(r) +
                    " which sends " + std::to_string(bytes[r][c->rank()]));
      }
      Pointers data;
      for (const size_t offset : out.offsets) data.push_back(bytes_at(send, offset));
      const size_t room = round_bytes(kSlotBytes / c->ranks());
      exchange(*c, data, bytes, [&](size_t offset, const Pointers& from) {
        for (uint32_t r = 0; r < c->ranks(); ++r) {
          const size_t part = part_of(in.bytes[r], offset, room);
          if (part) std::memcpy(bytes_at(receive, in.offsets[r] + offset), from[r], part);
        }
      });
    });
  });
}

void reduce_scatter(const char* function, Handle c, const void* send, Parts out, void* receive, size_t received,
                    HcclDataType dtype, HcclReduceOp op, aclrtStream stream) {
  submit(stream, function, [=] {
    Call call = call_of(function, dtype, 0, 0, op);
    std::copy(out.bytes.begin(), out.bytes.end(), call.counts.begin());
    c->collective(call, [&] {
      for (uint32_t r = 0; r < c->ranks(); ++r) {
        require(std::equal(out.bytes.begin(), out.bytes.end(), c->call_of(r).counts.begin()), function,
                "recvCount", "rank " + std::to_string(r) + " has other counts");
      }
      Pointers data;
      for (const size_t offset : out.offsets) data.push_back(bytes_at(send, offset));
      const std::vector<std::vector<size_t>> bytes(c->ranks(), out.bytes);
      const size_t room = round_bytes(kSlotBytes / c->ranks());
      exchange(*c, data, bytes, [&](size_t offset, const Pointers& from) {
        const size_t part = part_of(received, offset, room);
        if (part) reduce(from, part, dtype, op, bytes_at(receive, offset));
      });
    });
  });
}

void all_gather(const char* function, Handle c, const void* send, Parts in, void* receive, HcclDataType dtype,
                uint64_t count, aclrtStream stream) {
  submit(stream, function, [=] {
    c->collective(call_of(function, dtype, count), [&] {
      share(*c, static_cast<const char*>(send), in.bytes, [&](size_t offset, const Pointers& from) {
        for (uint32_t r = 0; r < c->ranks(); ++r) {
          const size_t part = part_of(in.bytes[r], offset, kSlotBytes);
          if (part) std::memcpy(bytes_at(receive, in.offsets[r] + offset), from[r], part);
        }
      });
    });
  });
}

}  // namespace

extern "C" {

HcclResult HcclAllReduce(void* send, void* receive, uint64_t count, HcclDataType dtype, HcclReduceOp op,
                         HcclComm comm, aclrtStream stream) {
  constexpr const char* kName = "HcclAllReduce";
  return answering(kName, [&] {
    const Handle c = handle_of(kName, comm);
    require_reduction(kName, dtype, op);
    const size_t bytes = require_buffer(kName, "sendBuf", send, count, dtype);
    require_buffer(kName, "recvBuf", receive, count, dtype);
    submit(stream, kName, [=] {
      c->collective(call_of(kName, dtype, count, 0, op), [&] {
        share(*c, static_cast<const char*>(send), equal_bytes(*c, bytes),
              [&](size_t offset, const Pointers& from) {
                reduce(from, part_of(bytes, offset, kSlotBytes), dtype, op, bytes_at(receive, offset));
              });
      });
    });
  });
}

HcclResult HcclReduce(void* send, void* receive, uint64_t count, HcclDataType dtype, HcclReduceOp op,
                      uint32_t root, HcclComm comm, aclrtStream stream) {
  constexpr const char* kName = "HcclReduce";
  return answering(kName, [&] {
    const Handle c = handle_of(kName, comm);
    require_reduction(kName, dtype, op);
    require_rank(kName, "root", root, *c);
    const size_t bytes = require_buffer(kName, "sendBuf", send, count, dtype);
    if (c->rank() == root) require_buffer(kName, "recvBuf", receive, count, dtype);
    submit(stream, kName, [=] {
      c->collective(call_of(kName, dtype, count, root, op), [&] {
        share(*c, static_cast<const char*>(send), equal_bytes(*c, bytes),
              [&](size_t offset, const Pointers& from) {
                const size_t part = part_of(bytes, offset, kSlotBytes);
                if (c->rank() == root) reduce(from, part, dtype, op, bytes_at(receive, offset));
              });
      });
    });
  });
}

HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType dtype, uint32_t root, HcclComm comm,
                         aclrtStream stream) {
  constexpr const char* kName = "HcclBroadcast";
  return answering(kName, [&] {
    const Handle c = handle_of(kName, comm);
    require_rank(kName, "root", root, *c);
    const size_t bytes = require_buffer(kName, "buf", buffer, count, dtype);
    submit(stream, kName, [=] {
      c->collective(call_of(kName, dtype, count, root), [&] {
        std::vector<size_t> shown(c->ranks(), 0);
        shown[root] = bytes;
        share(*c, static_cast<const char*>(buffer), shown, [&](size_t offset, const Pointers& from) {
          const size_t part = part_of(bytes, offset, kSlotBytes);
          if (c->rank() != root) std::memcpy(bytes_at(buffer, offset), from[root], part);
        });
      });
    });
  });
}

HcclResult HcclAllGather(void* send, void* receive, uint64_t count, HcclDataType dtype, HcclComm comm,
                         aclrtStream stream) {
  constexpr const char* kName = "HcclAllGather";
  return answering(kName, [&] {
    const Handle c = handle_of(kName, comm);
    const size_t bytes = require_buffer(kName, "sendBuf", send, count, dtype);
    require_buffer(kName, "recvBuf", receive, count * c->ranks(), dtype);
    all_gather(kName, c, send, equal_parts(*c, bytes), receive, dtype, count, stream);
  });
}

HcclResult HcclAllGatherV(void* send, uint64_t count, void* receive, const void* counts,
                          const void* displacements, HcclDataType dtype, HcclComm comm, aclrtStream stream) {
  constexpr const char* kName = "HcclAllGatherV";
  return answering(kName, [&] {
    const Handle c = handle_of(kName, comm);
    const size_t bytes = require_buffer(kName, "sendBuf", send, count, dtype);
    const Parts in = parts_of(*c, counts, displacements, dtype);
    require_parts(kName, "recvBuf", receive, in, dtype);
    require(in.bytes[c->rank()] == bytes, kName, "sendCount", "it differs from this rank's recvCounts");
    all_gather(kName, c, send, in, receive, dtype, 0, stream);
  });
}

HcclResult HcclReduceScatter(void* send, void* receive, uint64_t count, HcclDataType dtype, HcclReduceOp op,
                             HcclComm comm, aclrtStream stream) {
  constexpr const char* kName = "HcclReduceScatter";
  return answering(kName, [&] {
    const Handle c = handle_of(kName, comm);
    require_reduction(kName, dtype, op);
    const size_t bytes = require_buffer(kName, "recvBuf", receive, count, dtype);
    require_buffer(kName, "sendBuf", send, count * c->ranks(), dtype);
    reduce_scatter(kName, c, send, equal_parts(*c, bytes), receive, bytes, dtype, op, stream);
  });
}

HcclResult HcclReduceScatterV(void* send, const void* counts, const void* displacements, void* receive,
                              uint64_t count, HcclDataType dtype, HcclReduceOp op, HcclComm comm,
                              aclrtStream stream) {
  constexpr const char* kName = "HcclReduceScatterV";
  return answering(kName, [&] {
    const Handle c = handle_of(kName, comm);
    require_reduction(kName, dtype, op);
    const size_t bytes = require_buffer(kName, "recvBuf", receive, count, dtype);
    const Parts out = parts_of(*c, counts, displacements, dtype);
    require_parts(kName, "sendBuf", send, out, dtype);
    require(out.bytes[c->rank()] == bytes, kName, "recvCount", "it differs from this rank's sendCounts");
    reduce_scatter(kName, c, send, out, receive, bytes, dtype, op, stream);
  });
}

HcclResult HcclScatter(void* send, void* receive, uint64_t count, HcclDataType dtype, uint32_t root,
                       HcclComm comm, aclrtStream stream) {
  constexpr const char* kName = "HcclScatter";
  return answering(kName, [&] {
    const Handle c = handle_of(kName, comm);
    require_rank(kName, "root", root, *c);
    const size_t bytes = require_buffer(kName, "recvBuf", receive, count, dtype);
    if (c->rank() == root) require_buffer(kName, "sendBuf", send, count * c->ranks(), dtype);
    submit(stream, kName, [=] {
      c->collective(call_of(kName, dtype, count, root), [&] {
        std::vector<std::vector<size_t>> sent(c->ranks(), std::vector<size_t>(c->ranks(), 0));
        sent[root].assign(c->ranks(), bytes);
        Pointers data;
        for (uint32_t to = 0; to < c->ranks(); ++to) data.push_back(bytes_at(send, to * bytes));
        const size_t room = round_bytes(kSlotBytes / c->ranks());
        exchange(*c, data, sent, [&](size_t offset, const Pointers& from) {
          std::memcpy(bytes_at(receive, offset), from[root], part_of(bytes, offset, room));
        });
      });
    });
  });
}

HcclResult HcclAlltoAll(const void* send, uint64_t send_count, HcclDataType send_type, const void* receive,
                        uint64_t receive_count, HcclDataType receive_type, HcclComm comm, aclrtStream stream) {
  constexpr const char* kName = "HcclAlltoAll";
  return answering(kName, [&] {
    const Handle c = handle_of(kName, comm);
    require(send_type == receive_type, kName, "recvType", "it differs from sendType");
    require(send_count == receive_count, kName, "recvCount", "it differs from sendCount");
    const Parts parts = equal_parts(*c, require_buffer(kName, "sendBuf", send, send_count, send_type));
    all_to_all(kName, c, send, parts, const_cast<void*>(receive), parts, send_type, stream);
  });
}

HcclResult HcclAlltoAllV(const void* send, const void* send_counts, const void* send_displacements,
                         HcclDataType send_type, const void* receive, const void* receive_counts,
                         const void* receive_displacements, HcclDataType receive_type, HcclComm comm,
                         aclrtStream stream) {
  constexpr const char* kName = "HcclAlltoAllV";
  return answering(kName, [&] {
    const Handle c = handle_of(kName, comm);
    require(send_type == receive_type, kName, "recvType", "it differs from sendType");
    require(element_size(send_type) > 0, kName, "sendType", "it is not supported");
    const Parts out = parts_of(*c, send_counts, send_displacements, send_type);
    const Parts in = parts_of(*c, receive_counts, receive_displacements, receive_type);
    all_to_all(kName, c, send, out, const_cast<void*>(receive), in, send_type, stream);
  });
}

// The matrix holds at [from][to] what each rank sends; parts follow one another in both buffers.
HcclResult HcclAlltoAllVC(const void* send, const void* matrix, HcclDataType send_type, const void* receive,
                          HcclDataType receive_type, HcclComm comm, aclrtStream stream) {
  constexpr const char* kName = "HcclAlltoAllVC";
  return answering(kName, [&] {
    const Handle c = handle_of(kName, comm);
    require(send_type == receive_type, kName, "recvType", "it differs from sendType");
    require(element_size(send_type) > 0, kName, "sendType", "it is not supported");
    const auto* counts = static_cast<const uint64_t*>(matrix);
    Parts out, in;
    size_t sent = 0, received = 0;
    for (uint32_t r = 0; r < c->ranks(); ++r) {
      out.offsets.push_back(sent);
      in.offsets.push_back(received);
      out.bytes.push_back(counts[c->rank() * c->ranks() + r] * element_size(send_type));
      in.bytes.push_back(counts[r * c->ranks() + c->rank()] * element_size(send_type));
      sent += out.bytes.back();
      received += in.bytes.back();
    }
    all_to_all(kName, c, send, out, const_cast<void*>(receive), in, send_type, stream);
  });
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  constexpr const char* kName = "HcclBarrier";
  return answering(kName, [&] {
    const Handle c = handle_of(kName, comm);
    submit(stream, kName, [=] { c->collective(call_of(kName, HCCL_DATA_TYPE_INT8, 0), [] {}); });
  });
}

}  // extern "C"
