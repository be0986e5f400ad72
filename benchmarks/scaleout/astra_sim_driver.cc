// Sends given messages over given links in ASTRA-Sim's analytical network backend (congestion aware), and prints when the
// last one is there. benchmarks/scaleout/against_astra_sim.py writes the input, and says how this is built.
//
// Input: the window of a channel; devices, links; for each link its ends, GiB/s and latency; messages; for each message its channel, its bytes, its chunks, the
// number of messages that it waits for and these, the number of devices on its route and these.
#include <cstdio>
#include <deque>
#include <iostream>
#include <map>
#include <memory>
#include <vector>

#include "common/EventQueue.hh"
#include "congestion_aware/Chunk.hh"
#include "congestion_aware/Topology.hh"

using namespace NetworkAnalytical;
using namespace NetworkAnalyticalCongestionAware;

struct Message;

// A rank sends the messages of a channel chunk by chunk in turn, since those that start together share its links. At most a
// window of bytes is under way.
struct Sender {
  std::deque<Message*> ready;
  uint64_t in_flight = 0;
};

static std::map<std::pair<int, int>, Sender> senders;  // by rank and channel
static uint64_t window = 0;

class GivenLinks final : public Topology {
 public:
  explicit GivenLinks(std::istream& in) {
    int links = 0;
    in >> devices_count >> links;
    npus_count = devices_count;
    instantiate_devices();
    for (int link = 0; link < links; link++) {
      int from = 0, to = 0;
      double bandwidth = 0, latency = 0;
      in >> from >> to >> bandwidth >> latency;
      connect(from, to, bandwidth, latency, false);
    }
  }
  Route route(DeviceId from, DeviceId to) const noexcept override { return {devices[from], devices[to]}; }
  std::shared_ptr<Device> device(int id) const { return devices[id]; }
};

struct Message {
  uint64_t chunk_bytes = 0;
  int chunks_to_send = 0;
  int chunks_to_come = 0;
  int waits_for = 0;
  Sender* sender = nullptr;
  Route route;
  std::vector<Message*> followers;
};

static Topology* network = nullptr;

static void chunk_is_there(void* argument);

static void send(Sender& sender) {
  while (!sender.ready.empty() && sender.in_flight < window) {
    auto* message = sender.ready.front();
    sender.ready.pop_front();
    sender.in_flight += message->chunk_bytes;
    network->send(std::make_unique<Chunk>(message->chunk_bytes, message->route, chunk_is_there, message));
    if (--message->chunks_to_send > 0) sender.ready.push_back(message);
  }
}

static void chunk_is_there(void* argument) {
  auto* message = static_cast<Message*>(argument);
  message->sender->in_flight -= message->chunk_bytes;
  if (--message->chunks_to_come == 0)
    for (auto* follower : message->followers)
      if (--follower->waits_for == 0) {
        follower->sender->ready.push_back(follower);
        send(*follower->sender);
      }
  send(*message->sender);
}

int main() {
  auto queue = std::make_shared<EventQueue>();
  Topology::set_event_queue(queue);
  std::cin >> window;
  GivenLinks topology(std::cin);
  network = &topology;
  int count = 0;
  std::cin >> count;
  std::vector<Message> messages(count);
  for (auto& message : messages) {
    double bytes = 0;
    int length = 0, channel = 0;
    std::cin >> channel >> bytes >> message.chunks_to_send >> message.waits_for;
    message.chunk_bytes = static_cast<uint64_t>(bytes / message.chunks_to_send);
    message.chunks_to_come = message.chunks_to_send;
    for (int wait = 0; wait < message.waits_for; wait++) {
      int before = 0;
      std::cin >> before;
      messages[before].followers.push_back(&message);
    }
    std::cin >> length;
    std::vector<int> devices(length);
    for (int& device : devices) {
      std::cin >> device;
      message.route.push_back(topology.device(device));
    }
    message.sender = &senders[{devices.at(0), channel}];
    if (message.waits_for == 0) message.sender->ready.push_back(&message);
  }
  if (!std::cin) {
    std::cerr << "the input ends too early\n";
    return 1;
  }
  for (auto& [channel, sender] : senders) send(sender);
  while (!queue->finished()) queue->proceed();
  for (const auto& message : messages)
    if (message.chunks_to_come) {
      std::cerr << "a message was never sent\n";
      return 1;
    }
  std::printf("%llu\n", static_cast<unsigned long long>(queue->get_current_time()));
}
