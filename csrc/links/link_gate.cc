#include "link_gate.h"

#include <pthread.h>

#include <algorithm>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "../process.h"

namespace crux {
namespace {

std::atomic<LinkGate*> process_gate{nullptr};

void leave_to_the_parent() noexcept {
  set_gate(nullptr);
  process_gate.store(nullptr);
  LinkFile::after_fork_in_child();
}

uint64_t hash_of(const std::string& text) noexcept {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001b3;
  return hash == 0 ? 1 : hash;
}

}  // namespace

LinkGate& LinkGate::process() {
  static const int error =
      pthread_atfork(LinkFile::before_fork, LinkFile::after_fork_in_parent, leave_to_the_parent);
  if (error != 0) throw std::system_error(error, std::generic_category(), "pthread_atfork");
  LinkGate* gate = process_gate.load();
  if (gate) return *gate;
  auto made = std::make_unique<LinkGate>();
  if (!process_gate.compare_exchange_strong(gate, made.get())) return *gate;
  // Never destroyed: a backend's thread may complete an operation while the process exits.
  return *made.release();
}

const Gate::Route* LinkGate::route(uint32_t group, int64_t bytes) noexcept {
  if (group >= kMaxGroups || bytes == 0 || forked()) return nullptr;
  return routes_[group].load(std::memory_order_acquire);
}

bool LinkGate::outranked(const Route& route) noexcept {
  if (forked()) return false;
  return std::any_of(route.begin(), route.end(), [](LinkTable* link) { return link->outranked(); });
}

uint64_t LinkGate::enter(uint32_t group, int64_t bytes) noexcept {
  Attempt attempt{route(group, bytes)};
  if (!attempt.route) return 0;
  uint64_t ticket = 0;
  while ((ticket = try_enter(attempt)) == 0) {
    const int64_t wait_ns = wait_ns_.load(std::memory_order_relaxed);
    attempt.marked->sleep(attempt.begun_ns + wait_ns, wait_ns);
  }
  return ticket;
}

// A waiting operation holds no link. It is marked on the link where it waits, so that lower ones
// don't overtake it when the higher one leaves.
uint64_t LinkGate::try_enter(Attempt& attempt) noexcept {
  const int64_t wait_ns = wait_ns_.load(std::memory_order_relaxed);
  if (forked()) return pass(attempt);
  const Route& route = *attempt.route;
  const auto hindering = std::find_if(
      route.begin(), route.end(), [wait_ns](LinkTable* link) { return link->hindered(wait_ns); });
  if (hindering == route.end()) return pass(attempt);
  const int64_t now_ns = monotonic_ns();
  if (attempt.begun_ns == 0) attempt.begun_ns = now_ns;
  const int64_t until_ns = attempt.begun_ns + wait_ns;
  if (now_ns >= until_ns) {
    ran_out_.fetch_add(1, std::memory_order_relaxed);
    for (LinkTable* link : route) link->exempt_until(until_ns + kExemptWaits * wait_ns);
    return pass(attempt);
  }
  if (attempt.marked != *hindering) {
    if (attempt.marked) attempt.marked->unmark();
    attempt.marked = *hindering;
    attempt.marked->mark();
  }
  return 0;
}

uint64_t LinkGate::pass(Attempt& attempt) noexcept {
  if (attempt.begun_ns != 0) count_wait(monotonic_ns() - attempt.begun_ns);
  // The ticket is the route.
  if (forked()) return reinterpret_cast<uintptr_t>(attempt.route);
  for (LinkTable* link : *attempt.route) {
    if (link != attempt.marked) link->mark();
  }
  return reinterpret_cast<uintptr_t>(attempt.route);
}

void LinkGate::give_up(Attempt& attempt) noexcept {
  if (attempt.begun_ns != 0) count_wait(monotonic_ns() - attempt.begun_ns);
  if (attempt.marked && !forked()) attempt.marked->unmark();
  attempt = {};
}

void LinkGate::leave(uint64_t ticket) noexcept {
  if (ticket == 0 || forked()) return;
  for (LinkTable* link : *reinterpret_cast<const Route*>(ticket)) link->unmark();
}

void LinkGate::count_wait(int64_t waited_ns) noexcept {
  waited_.fetch_add(1, std::memory_order_relaxed);
  waited_ns_.fetch_add(waited_ns, std::memory_order_relaxed);
  int64_t longest_ns = longest_ns_.load(std::memory_order_relaxed);
  while (longest_ns < waited_ns && !longest_ns_.compare_exchange_weak(longest_ns, waited_ns)) {
  }
}

size_t LinkGate::join(const std::string& folder, const std::string& cluster,
                      const std::string& link, const std::string& job) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::string path = LinkFile::path_of(folder, cluster, link);
  for (size_t i = 0; i < tables_.size(); ++i) {
    if (tables_[i]->path() == path && !tables_[i]->lost() && tables_[i]->rejoin(hash_of(job))) {
      tables_[i]->set_rank(rank_);
      return i;
    }
  }
  tables_.push_back(std::make_unique<LinkTable>(folder, cluster, link, hash_of(job)));
  tables_.back()->set_rank(rank_);
  return tables_.size() - 1;
}

void LinkGate::retire() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& route : routes_) route.store(nullptr);
  rank_ = 0;
  for (const auto& table : tables_) table->retire();
}

void LinkGate::set_level(int level, double priority) {
  const std::lock_guard<std::mutex> lock(mutex_);
  rank_ = LinkTable::rank_at(level, priority);
  for (const auto& table : tables_) table->set_rank(rank_);
}

void LinkGate::cross(uint32_t group, const std::vector<size_t>& links) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (group >= kMaxGroups) throw std::invalid_argument("too many process groups");
  Route route;
  for (const size_t link : links) route.push_back(tables_.at(link).get());
  std::sort(route.begin(), route.end(),
            [](const LinkTable* a, const LinkTable* b) { return a->link() < b->link(); });
  route.erase(std::unique(route.begin(), route.end()), route.end());
  const Route* kept = route.empty() ? nullptr : &*known_routes_.insert(std::move(route)).first;
  routes_[group].store(kept, std::memory_order_release);
}

}  // namespace crux
