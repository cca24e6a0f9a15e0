#include "allocator.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace crux::fluid {
namespace {

// Two water levels, or a load and a capacity, that differ by less than this share are equal.
constexpr double kTolerance = 1e-10;
// A rate that changes by less than this share keeps its old value.
constexpr double kUnchanged = 1e-14;

bool above(double a, double b) { return a > b * (1.0 + kTolerance); }

}  // namespace

Allocator::Allocator(const Network& network) {
  links_.resize(network.size());
  for (LinkId link = 0; link < network.size(); ++link) {
    links_[link].capacity = network.capacity(link).value();
    marks_.grow(link);
  }
}

void Allocator::seed(JobId id) {
  if (transfers_[id].seeded) return;
  transfers_[id].seeded = true;
  seeds_.push_back(id);
}

void Allocator::start(JobId id, int level, double weight, double ceiling_Bps,
                      const std::vector<Crossing>& crossings, const Sharing& sharing) {
  if (id >= transfers_.size()) {
    transfers_.resize(id + 1);
    marks_.grow(static_cast<std::uint32_t>(links_.size()) + id);
  }
  Transfer& t = transfers_[id];
  t.active = true;
  t.water = 0.0;
  t.level = level;
  t.weight = weight;
  t.ceiling = ceiling_Bps / weight;
  t.bottleneck = kNone;
  t.slots.clear();
  for (const Crossing& crossing : crossings) {
    if (!sharing.contended(crossing.link)) continue;
    std::vector<Member>& members = links_[crossing.link].members;
    const double on_link = weight * crossing.share;
    members.push_back({id, static_cast<std::uint32_t>(t.slots.size()), on_link, level});
    t.slots.push_back({crossing.link, static_cast<std::uint32_t>(members.size() - 1), on_link});
    // A link that the allocation looks at anyway bounds the transfer by itself.
    if (links_[crossing.link].capacity <= t.ceiling * on_link * (1.0 + kTolerance)) {
      t.ceiling = EventQueue::kNever;
    }
  }
  seed(id);
}

void Allocator::stop(JobId id) {
  Transfer& t = transfers_[id];
  t.active = false;
  for (const Slot& slot : t.slots) {
    std::vector<Member>& members = links_[slot.link].members;
    members[slot.position] = members.back();
    members.pop_back();
    if (slot.position < members.size()) {
      const Member& moved = members[slot.position];
      transfers_[moved.id].slots[moved.slot].position = slot.position;
    }
    for (const Member& member : members) {
      if (member.level <= t.level && transfers_[member.id].bottleneck == slot.link) seed(member.id);
    }
  }
  t.slots.clear();
}

const std::vector<JobId>& Allocator::resolve() {
  changed_.clear();
  while (!seeds_.empty()) {
    level_ = transfers_[seeds_.front()].level;
    for (JobId id : seeds_) level_ = std::max(level_, transfers_[id].level);
    ++epoch_;
    touched_.clear();
    opened_.clear();
    std::size_t kept = 0;
    for (std::size_t i = 0; i < seeds_.size(); ++i) {
      const JobId id = seeds_[i];
      if (transfers_[id].active && transfers_[id].level < level_) {
        seeds_[kept++] = id;
        continue;
      }
      transfers_[id].seeded = false;
      if (transfers_[id].active) touch(id);
    }
    seeds_.resize(kept);
    fill();
    commit();
    seed_below();
  }
  return changed_;
}

// Lets a transfer rise again from where it stands, and makes its links' marks subject to it.
void Allocator::touch(JobId id) {
  Transfer& t = transfers_[id];
  t.epoch = epoch_;
  t.frozen = false;
  touched_.push_back(id);
  ++rising_;
  for (const Slot& slot : t.slots) {
    Link& link = links_[slot.link];
    if (link.epoch != epoch_) open(slot.link);
    link.room += slot.weight * t.water;
    link.demand += slot.weight;
    ++link.rising;
    marks_.set(slot.link, std::min(lowest_mark(link), link.old_mark));
  }
  marks_.set(static_cast<std::uint32_t>(links_.size()) + id, t.ceiling);
}

// Sums up a link before the first of its members is touched.
void Allocator::open(LinkId id) {
  Link& link = links_[id];
  link.epoch = epoch_;
  opened_.push_back(id);
  link.room = link.capacity;
  link.demand = 0.0;
  link.rising = 0;
  link.old_mark = EventQueue::kNever;
  for (const Member& member : link.members) {
    if (member.level < level_) continue;
    const Transfer& t = transfers_[member.id];
    link.room -= member.weight * t.water;
    if (member.level == level_ && t.bottleneck == id && t.epoch != epoch_) {
      link.old_mark = std::min(link.old_mark, t.water);
    }
  }
  if (link.old_mark < EventQueue::kNever) ++old_marks_;
}

// A lower bound of the mark: as if the untouched members all froze where they did before.
double Allocator::lowest_mark(const Link& link) const {
  if (link.rising > 0) return std::max(link.room, 0.0) / link.demand;
  return overfull(link) ? 0.0 : EventQueue::kNever;
}

// The frozen leave less than the untouched had: these freeze lower than they did before.
bool Allocator::overfull(const Link& link) { return link.room < -kTolerance * link.capacity; }

bool Allocator::any_overfull() const {
  return std::any_of(opened_.begin(), opened_.end(),
                     [this](LinkId id) { return overfull(links_[id]); });
}

// The mark: where the link is full if its untouched members rise no higher than they did before.
double Allocator::mark(const Link& link) const {
  double mark = -1.0;
  for (std::size_t free_before = SIZE_MAX;;) {
    double room = link.capacity;
    double demand = 0.0;
    std::size_t free = 0;
    for (const Member& member : link.members) {
      if (member.level < level_) continue;
      const Transfer& t = transfers_[member.id];
      const bool touched = t.epoch == epoch_;
      if (touched && t.frozen) {
        room -= member.weight * t.next;
      } else if (touched || (member.level == level_ && t.water > mark)) {
        demand += member.weight;
        ++free;
      } else {
        room -= member.weight * t.water;
      }
    }
    if (free == 0) return EventQueue::kNever;
    mark = std::max(room, 0.0) / demand;
    if (free >= free_before) return mark;
    free_before = free;
  }
}

// Water-filling of the touched, in the order in which links become full and ceilings are reached.
void Allocator::fill() {
  const auto first_ceiling = static_cast<std::uint32_t>(links_.size());
  while (!marks_.empty() && (rising_ > 0 || old_marks_ > 0 || any_overfull())) {
    const double water = marks_.next_time();
    const std::uint32_t id = marks_.next_id();
    if (id >= first_ceiling) {
      freeze(id - first_ceiling, water, kOwnCeiling);
    } else {
      reach(id, water);
    }
  }
  marks_.clear();
}

// The filling has come to a mark noted for a link: is the link full here?
void Allocator::reach(LinkId id, double water) {
  Link& link = links_[id];
  double full_at = lowest_mark(link);
  if (!above(full_at, water)) full_at = mark(link);
  if (!above(link.old_mark, water)) {
    const double old_mark = std::exchange(link.old_mark, EventQueue::kNever);
    --old_marks_;
    if (above(full_at, old_mark)) {
      for (const Member& member : link.members) {
        const Transfer& t = transfers_[member.id];
        if (member.level == level_ && t.epoch != epoch_ && t.bottleneck == id) touch(member.id);
      }
      full_at = lowest_mark(link);
      marks_.set(id, full_at);
      return;
    }
  }
  if (above(full_at, water)) {
    marks_.set(id, std::min(full_at, link.old_mark));
    return;
  }
  for (const Member& member : link.members) {
    if (member.level != level_) continue;
    const Transfer& t = transfers_[member.id];
    if (t.epoch != epoch_ && above(t.water, full_at)) touch(member.id);
    if (t.epoch == epoch_ && !t.frozen) freeze(member.id, full_at, id);
  }
  if (link.old_mark < EventQueue::kNever) {
    link.old_mark = EventQueue::kNever;
    --old_marks_;
  }
  marks_.remove(id);
}

void Allocator::freeze(JobId id, double water, LinkId bottleneck) {
  Transfer& t = transfers_[id];
  t.frozen = true;
  t.next = water;
  t.next_bottleneck = bottleneck;
  --rising_;
  for (const Slot& slot : t.slots) {
    Link& link = links_[slot.link];
    link.room -= slot.weight * water;
    link.demand -= slot.weight;
    --link.rising;
  }
  marks_.remove(static_cast<std::uint32_t>(links_.size()) + id);
}

void Allocator::commit() {
  changed_before_level_ = changed_.size();
  for (JobId id : touched_) {
    Transfer& t = transfers_[id];
    t.bottleneck = t.next_bottleneck;
    const double difference = t.next > t.water ? t.next - t.water : t.water - t.next;
    if (difference <= kUnchanged * t.water) continue;
    t.water = t.next;
    changed_.push_back(id);
  }
}

// What a level leaves over has changed on the links of its changed transfers.
void Allocator::seed_below() {
  const std::uint64_t seen = ++epoch_;
  for (std::size_t i = changed_before_level_; i < changed_.size(); ++i) {
    for (const Slot& slot : transfers_[changed_[i]].slots) {
      Link& link = links_[slot.link];
      if (link.epoch == seen) continue;
      link.epoch = seen;
      double load = 0.0;
      bool lower = false;
      for (const Member& member : link.members) {
        load += member.weight * transfers_[member.id].water;
        lower = lower || member.level < level_;
      }
      if (!lower) continue;
      const bool overfull = above(load, link.capacity);
      for (const Member& member : link.members) {
        if (member.level >= level_) continue;
        if (overfull || transfers_[member.id].bottleneck == slot.link) seed(member.id);
      }
    }
  }
}

}  // namespace crux::fluid
