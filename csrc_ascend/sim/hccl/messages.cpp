// Messages between two ranks, sent in frames through a channel per pair of ranks, which buffers one frame.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "sim/hccl/entry.h"

using namespace ascend_sim;
using namespace ascend_sim::hccl;

namespace {

struct Message {
  const char* function;
  bool outgoing;
  char* data;
  uint64_t count;
  HcclDataType dtype;
  uint32_t other;
  size_t bytes;
  size_t done = 0;
  bool finished = false;
};

Message checked(const char* function, const Communicator& c, bool outgoing, void* buffer, uint64_t count,
                HcclDataType dtype, uint32_t other) {
  require_rank(function, outgoing ? "destRank" : "srcRank", other, c);
  require(other != c.rank(), function, outgoing ? "destRank" : "srcRank", "it is this rank itself");
  const size_t bytes = require_buffer(function, outgoing ? "sendBuf" : "recvBuf", buffer, count, dtype);
  return {function, outgoing, static_cast<char*>(buffer), count, dtype, other, bytes};
}

// Both sides must agree on the message.
void require_match(const Message& message, const Channel& channel) {
  const auto differs = [&](const char* argument, uint64_t here, uint64_t there) {
    if (here == there) return;
    throw Failure(HCCL_E_PARA, std::string(message.function) + ": " + argument + ": " + std::to_string(here) +
                                   " but rank " + std::to_string(message.other) + " sends " +
                                   std::to_string(there));
  };
  differs("count", message.count, channel.count);
  differs("dataType", static_cast<uint64_t>(message.dtype), static_cast<uint64_t>(channel.dtype));
}

// Moves one frame if the channel is ready for it. An empty message is one empty frame.
bool advance(Communicator& c, Message& message) {
  Channel& channel = message.outgoing ? c.channel(c.rank(), message.other) : c.channel(message.other, c.rank());
  if (message.finished || (channel.full.load() != 0) == message.outgoing) return false;
  if (message.outgoing) {
    channel.count = message.count;
    channel.dtype = message.dtype;
    channel.bytes = static_cast<uint32_t>(std::min(kFrameBytes, message.bytes - message.done));
    std::memcpy(channel.frame, message.data + message.done, channel.bytes);
  } else {
    require_match(message, channel);
    std::memcpy(message.data + message.done, channel.frame, channel.bytes);
  }
  message.done += channel.bytes;
  message.finished = message.done == message.bytes;
  channel.full.store(message.outgoing ? 1 : 0);
  return true;
}

// Messages between the same two ranks in the same direction are sequential, others concurrent.
bool advance_all(Communicator& c, std::vector<Message>& messages) {
  bool moved = false;
  for (size_t i = 0; i < messages.size(); ++i) {
    const auto before =
        std::any_of(messages.begin(), messages.begin() + static_cast<std::ptrdiff_t>(i), [&](const Message& m) {
          return !m.finished && m.outgoing == messages[i].outgoing && m.other == messages[i].other;
        });
    if (!before) moved = advance(c, messages[i]) || moved;
  }
  return moved;
}

void run(Communicator& c, std::vector<Message> messages) {
  const auto finished = [&] {
    return std::all_of(messages.begin(), messages.end(), [](const Message& m) { return m.finished; });
  };
  while (!finished()) {
    c.wait([&] { return advance_all(c, messages); }, "the other side of a message");
  }
}

// Messages of one communicator and stream.
struct Batch {
  const char* function;
  Handle communicator;
  aclrtStream stream;
  std::vector<Message> messages;
};

// A thread's groups that have not ended, and what they hold back.
thread_local int open_groups = 0;
thread_local std::vector<Batch> held_back;

void submit_batch(const Batch& batch) {
  submit(batch.stream, batch.function,
         [c = batch.communicator, messages = batch.messages] { c->messages([&] { run(*c, messages); }); });
}

HcclResult submit_messages(const char* function, HcclComm comm, aclrtStream stream,
                           const std::function<std::vector<Message>(const Communicator&)>& make) {
  return answering(function, [&] {
    const Handle c = handle_of(function, comm);
    const Batch batch{function, c, stream, make(*c)};
    if (open_groups == 0) return submit_batch(batch);
    const auto same = std::find_if(held_back.begin(), held_back.end(), [&](const Batch& other) {
      return other.communicator == c && other.stream == stream;
    });
    if (same == held_back.end()) {
      held_back.push_back(batch);
    } else {
      same->messages.insert(same->messages.end(), batch.messages.begin(), batch.messages.end());
    }
  });
}

}  // namespace

extern "C" {

HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType dtype, uint32_t destination, HcclComm comm,
                    aclrtStream stream) {
  return submit_messages("HcclSend", comm, stream, [&](const Communicator& c) {
    return std::vector<Message>{checked("HcclSend", c, true, buffer, count, dtype, destination)};
  });
}

HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType dtype, uint32_t source, HcclComm comm,
                    aclrtStream stream) {
  return submit_messages("HcclRecv", comm, stream, [&](const Communicator& c) {
    return std::vector<Message>{checked("HcclRecv", c, false, buffer, count, dtype, source)};
  });
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm comm, aclrtStream stream) {
  constexpr const char* kName = "HcclBatchSendRecv";
  return submit_messages(kName, comm, stream, [&](const Communicator& c) {
    require(items && count > 0, kName, "itemNum", "it must be positive");
    std::vector<Message> messages;
    for (uint32_t i = 0; i < count; ++i) {
      const HcclSendRecvItem& item = items[i];
      require(item.sendRecvType == HCCL_SEND || item.sendRecvType == HCCL_RECV, kName, "sendRecvInfo",
              "its type must be send or receive");
      messages.push_back(checked(kName, c, item.sendRecvType == HCCL_SEND, item.buf, item.count, item.dataType,
                                 item.remoteRank));
    }
    return messages;
  });
}

// Since CANN 9.1, looked up in libhcomm: the messages of a group begin together when the outermost group ends.
HcclResult HcclGroupStart() {
  ++open_groups;
  return HCCL_SUCCESS;
}

HcclResult HcclGroupEnd() {
  return answering("HcclGroupEnd", [] {
    require(open_groups > 0, "HcclGroupEnd", "group", "none has been started");
    if (--open_groups > 0) return;
    for (const Batch& batch : std::exchange(held_back, {})) submit_batch(batch);
  });
}

}  // extern "C"
