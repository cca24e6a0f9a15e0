// Plays jobs that compute and then reduce their gradients in rings, packet by packet, in ns-3.
//
// Usage: ns3_rings FILE. The file holds numbers only:
//   leaves, link bytes/s, a connection's window in bytes, horizon in s; jobs, then for each one:
//   level (0 to 3, higher first), compute_s, bytes that each ring reduces, start_s, ranks, rings,
//   then for each ring the leaf of each rank.
// Each job prints a line: iterations of rank 0 that ended, and their mean length in s.
//
// Every rank has a host of its own for each ring. All leaves are connected to one spine by links of the given
// rate, whose two ends serve four classes in strict priority, and drop nothing. A rank sends to the
// next one over one connection: datagrams, of which a window may be on their way without an answer.
// Of the 2(P-1) chunks it sends its own first, and each later one as it receives the one before.
// It computes again when all its rings are done.

#include <ns3/core-module.h>
#include <ns3/internet-module.h>
#include <ns3/network-module.h>
#include <ns3/point-to-point-module.h>
#include <ns3/traffic-control-module.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <queue>
#include <utility>
#include <vector>

namespace {

constexpr std::uint16_t kDataPort = 5000;
constexpr std::uint16_t kAnswerPort = 5001;
constexpr std::uint32_t kDatagram = 1472;
// The types of service that ns-3 maps to its priorities 0, 2, 4 and 6, by level.
constexpr std::uint8_t kTypeOfService[] = {0x00, 0x08, 0x18, 0x10};

struct Job {
  std::uint32_t level = 0;
  double compute_s = 0.0;
  std::uint64_t bytes = 0;
  double start_s = 0.0;
  std::vector<std::vector<std::uint32_t>> leaves;  // of each ring, of each rank
};

// A rank's two ends in one ring.
class Channel {
 public:
  Channel(const Job& job, ns3::Ptr<ns3::Node> node, ns3::Ipv4Address next,
          ns3::Ipv4Address previous, std::uint64_t window, std::function<void()> look)
      : level_(job.level),
        window_(window),
        chunk_(job.bytes / job.leaves[0].size()),
        whole_(chunk_ * 2 * (job.leaves[0].size() - 1)),
        look_(std::move(look)) {
    in_ = Open(node, kDataPort, ns3::InetSocketAddress(previous, kAnswerPort));
    in_->SetRecvCallback(ns3::MakeCallback(&Channel::Receive, this));
    out_ = Open(node, kAnswerPort, ns3::InetSocketAddress(next, kDataPort));
    out_->SetRecvCallback(ns3::MakeCallback(&Channel::Answered, this));
  }

  // Sends what may be sent in the iteration after `done` others.
  void Send(std::uint64_t done) {
    const std::uint64_t end = whole_ * (done + 1);
    const std::uint64_t may = std::min(end, whole_ * done + Here(done) + chunk_);
    while (sent_ < may && on_their_way_ < window_) {
      const auto size = static_cast<std::uint32_t>(std::min<std::uint64_t>(may - sent_, kDatagram));
      if (size < kDatagram && may < end) break;  // more will follow
      out_->Send(ns3::Create<ns3::Packet>(size));
      sent_ += size;
      on_their_way_ += size;
      sizes_.push(size);
    }
  }

  // Whether that iteration is complete here.
  bool Complete(std::uint64_t done) const {
    return Here(done) >= whole_ && sent_ >= whole_ * (done + 1);
  }

 private:
  ns3::Ptr<ns3::Socket> Open(ns3::Ptr<ns3::Node> node, std::uint16_t port,
                             const ns3::Address& peer) const {
    auto socket = ns3::Socket::CreateSocket(node, ns3::UdpSocketFactory::GetTypeId());
    socket->SetAttribute("RcvBufSize", ns3::UintegerValue(1 << 30));
    socket->Bind(ns3::InetSocketAddress(ns3::Ipv4Address::GetAny(), port));
    socket->Connect(peer);
    socket->SetIpTos(kTypeOfService[level_]);  // connecting sets it, too
    return socket;
  }

  std::uint64_t Here(std::uint64_t done) const {
    return received_ > whole_ * done ? received_ - whole_ * done : 0;
  }

  void Receive(ns3::Ptr<ns3::Socket> socket) {
    while (ns3::Ptr<ns3::Packet> packet = socket->Recv()) {
      received_ += packet->GetSize();
      // The answer is as long as a header; what it answers is known, since nothing is lost.
      socket->Send(ns3::Create<ns3::Packet>(0));
    }
    look_();
  }

  void Answered(ns3::Ptr<ns3::Socket> socket) {
    while (socket->Recv()) {
      on_their_way_ -= sizes_.front();
      sizes_.pop();
    }
    look_();
  }

  std::uint32_t level_;
  std::uint64_t window_;
  std::uint64_t chunk_;
  std::uint64_t whole_;  // bytes of an iteration over one connection
  std::function<void()> look_;
  ns3::Ptr<ns3::Socket> in_;
  ns3::Ptr<ns3::Socket> out_;
  std::uint64_t sent_ = 0;
  std::uint64_t received_ = 0;
  std::uint64_t on_their_way_ = 0;
  std::queue<std::uint32_t> sizes_;  // of the datagrams on their way
};

class Rank {
 public:
  explicit Rank(const Job& job) : job_(job) {
    ns3::Simulator::Schedule(ns3::Seconds(job.start_s + job.compute_s), &Rank::Reduce, this);
  }

  void Join(ns3::Ptr<ns3::Node> node, ns3::Ipv4Address next, ns3::Ipv4Address previous,
            std::uint64_t window) {
    channels_.push_back(
        std::make_unique<Channel>(job_, node, next, previous, window, [this] { Look(); }));
  }

  void Print() const {
    std::printf("%llu %.9f\n", static_cast<unsigned long long>(done_),
                done_ > 0 ? (last_end_s_ - job_.start_s) / static_cast<double>(done_) : 0.0);
  }

 private:
  void Reduce() {
    ready_ = true;
    Look();
  }

  // Sends what may be sent, and ends the iteration that is complete in all rings.
  void Look() {
    if (!ready_) return;
    bool complete = true;
    for (const auto& channel : channels_) {
      channel->Send(done_);
      complete = complete && channel->Complete(done_);
    }
    if (!complete) return;
    ready_ = false;
    ++done_;
    last_end_s_ = ns3::Simulator::Now().GetSeconds();
    ns3::Simulator::Schedule(ns3::Seconds(job_.compute_s), &Rank::Reduce, this);
  }

  const Job& job_;
  std::vector<std::unique_ptr<Channel>> channels_;
  std::uint64_t done_ = 0;
  bool ready_ = false;  // computed, and not yet done
  double last_end_s_ = 0.0;
};

// Strict priority between four classes, each with a queue of its own.
void Prioritise(const ns3::NetDeviceContainer& devices) {
  ns3::TrafficControlHelper helper;
  const std::uint16_t root = helper.SetRootQueueDisc(
      "ns3::PrioQueueDisc", "Priomap", ns3::StringValue("3 3 2 2 1 1 0 0 3 3 3 3 3 3 3 3"));
  const auto classes = helper.AddQueueDiscClasses(root, 4, "ns3::QueueDiscClass");
  helper.AddChildQueueDiscs(root, classes, "ns3::FifoQueueDisc", "MaxSize",
                            ns3::StringValue("1000000p"));
  helper.Install(devices);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s FILE\n", argv[0]);
    return 2;
  }
  std::ifstream file(argv[1]);
  std::uint32_t leaf_count = 0;
  double rate_Bps = 0.0;
  std::uint64_t window = 0;
  double horizon_s = 0.0;
  std::size_t job_count = 0;
  file >> leaf_count >> rate_Bps >> window >> horizon_s >> job_count;
  std::vector<Job> jobs(job_count);
  for (Job& job : jobs) {
    std::size_t ranks = 0;
    std::size_t rings = 0;
    file >> job.level >> job.compute_s >> job.bytes >> job.start_s >> ranks >> rings;
    job.leaves.assign(rings, std::vector<std::uint32_t>(ranks));
    for (auto& ring : job.leaves) {
      for (std::uint32_t& leaf : ring) file >> leaf;
    }
  }
  if (!file) {
    std::fprintf(stderr, "%s: expected numbers\n", argv[1]);
    return 2;
  }

  ns3::NodeContainer spine(1);
  ns3::NodeContainer leaves(leaf_count);
  ns3::InternetStackHelper stack;
  stack.Install(spine);
  stack.Install(leaves);
  ns3::PointToPointHelper cable;
  cable.SetChannelAttribute("Delay", ns3::TimeValue(ns3::MicroSeconds(20)));
  // What waits, waits in the classes.
  cable.SetQueue("ns3::DropTailQueue", "MaxSize", ns3::StringValue("2p"));
  ns3::Ipv4AddressHelper addresses("10.0.0.0", "255.255.255.252");
  const auto rate = static_cast<std::uint64_t>(8.0 * rate_Bps);
  for (std::uint32_t i = 0; i < leaf_count; ++i) {
    cable.SetDeviceAttribute("DataRate", ns3::DataRateValue(ns3::DataRate(rate)));
    const ns3::NetDeviceContainer ends = cable.Install(leaves.Get(i), spine.Get(0));
    Prioritise(ends);
    addresses.Assign(ends);
    addresses.NewNetwork();
  }
  cable.SetDeviceAttribute("DataRate", ns3::DataRateValue(ns3::DataRate(10 * rate)));
  struct Host {
    ns3::Ptr<ns3::Node> node;
    ns3::Ipv4Address address;
  };
  std::vector<std::vector<std::vector<Host>>> hosts;  // of each job's rings
  for (const Job& job : jobs) {
    hosts.emplace_back();
    for (const auto& ring : job.leaves) {
      hosts.back().emplace_back();
      for (std::uint32_t leaf : ring) {
        ns3::NodeContainer node(1);
        stack.Install(node);
        const ns3::NetDeviceContainer ends = cable.Install(node.Get(0), leaves.Get(leaf));
        Prioritise(ends);
        const ns3::Ipv4InterfaceContainer given = addresses.Assign(ends);
        addresses.NewNetwork();
        hosts.back().back().push_back({node.Get(0), given.GetAddress(0)});
      }
    }
  }
  ns3::Ipv4GlobalRoutingHelper::PopulateRoutingTables();

  std::vector<std::vector<std::unique_ptr<Rank>>> ranks;
  for (std::size_t j = 0; j < jobs.size(); ++j) {
    ranks.emplace_back();
    const std::size_t size = jobs[j].leaves[0].size();
    for (std::size_t r = 0; r < size; ++r) {
      ranks.back().push_back(std::make_unique<Rank>(jobs[j]));
      for (const auto& ring : hosts[j]) {
        ranks.back().back()->Join(ring[r].node, ring[(r + 1) % size].address,
                                  ring[(r + size - 1) % size].address, window);
      }
    }
  }
  ns3::Simulator::Stop(ns3::Seconds(horizon_s));
  ns3::Simulator::Run();
  for (const auto& job : ranks) job.front()->Print();
  ns3::Simulator::Destroy();
  return 0;
}
