#include "allocator.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

namespace crux::fluid {
namespace {

// Two water levels, or a load and a capacity, that differ by less than this share are equal.
constexpr double kTolerance = 1e-10;
// A rate that changes by less than this share keeps its old value.
constexpr double kUnchanged = 1e-14;

// Needs of two bursts that differ by less than this share are the same.
constexpr double kSameNeed = 1e-12;

bool above(double a, double b) { return a > b * (1.0 + kTolerance); }

bool same_need(double a, double b) {
  return a == b || std::abs(a - b) <= kSameNeed * std::min(a, b);
}

}  // namespace

Allocator::Allocator(const Network& network) {
  links_.resize(network.size());
  for (LinkId link = 0; link < network.size(); ++link) {
    links_[link].capacity = network.capacity(link).value();
  }
}

void Allocator::seed(JobId id) {
  if (transfers_[id].seeded) return;
  transfers_[id].seeded = true;
  seeds_.push_back(id);
}

void Allocator::start(JobId id, int level, double weight, double ceiling_Bps,
                      const std::vector<Crossing>& crossings, const Sharing& sharing) {
  if (id >= transfers_.size()) transfers_.resize(id + 1);
  Transfer& t = transfers_[id];
  const double ceiling = need(weight, ceiling_Bps, crossings, sharing);
  if (t.leaving) {
    if (needs_the_same(t, level, weight, ceiling)) {
      t.leaving = false;
      continued_.push_back(id);
      return;
    }
    remove(id);
  }
  ++active_at_[level];
  t.active = true;
  t.water = 0.0;
  t.level = level;
  t.weight = weight;
  t.ceiling = ceiling;
  t.bottleneck = kNone;
  t.slots.reserve(needs_.size());
  for (const Need& need : needs_) {
    std::vector<Member>& members = links_[need.link].members;
    const auto slot = static_cast<std::uint32_t>(t.slots.size());
    t.slots.push_back({need.link, static_cast<std::uint32_t>(members.size()), need.weight});
    members.push_back({need.weight, 0.0, 0.0, kNever, id, slot, level, false});
  }
  seed(id);
}

// Sets needs_ to what a transfer takes of contended links; returns its ceiling.
double Allocator::need(double weight, double ceiling_Bps, const std::vector<Crossing>& crossings,
                       const Sharing& sharing) {
  places_ += crossings.size();
  needs_.clear();
  double ceiling = ceiling_Bps / weight;
  for (const Crossing& crossing : crossings) {
    if (!sharing.contended(crossing.link)) continue;
    const double on_link = weight * crossing.share;
    needs_.push_back({crossing.link, on_link});
    // A link that the allocation looks at anyway bounds the transfer by itself.
    if (links_[crossing.link].capacity <= ceiling * on_link * (1.0 + kTolerance)) ceiling = kNever;
  }
  return ceiling;
}

bool Allocator::needs_the_same(const Transfer& t, int level, double weight, double ceiling) const {
  return t.level == level && t.weight == weight && same_need(t.ceiling, ceiling) &&
         std::equal(t.slots.begin(), t.slots.end(), needs_.begin(), needs_.end(),
                    [](const Slot& slot, const Need& need) {
                      return slot.link == need.link && same_need(slot.weight, need.weight);
                    });
}

void Allocator::stop(JobId id) {
  transfers_[id].leaving = true;
  leaving_.push_back(id);
}

void Allocator::remove(JobId id) {
  Transfer& t = transfers_[id];
  t.active = false;
  t.leaving = false;
  const auto level = active_at_.find(t.level);
  if (--level->second == 0) active_at_.erase(level);
  for (const Slot& slot : t.slots) {
    std::vector<Member>& members = links_[slot.link].members;
    members[slot.position] = members.back();
    members.pop_back();
    if (slot.position < members.size()) {
      const Member& moved = members[slot.position];
      transfers_[moved.id].slots[moved.slot].position = slot.position;
    }
    for (const Member& member : members) {
      if (member.held < kNever && member.level <= t.level) seed(member.id);
    }
  }
  t.slots.clear();
}

const std::vector<JobId>& Allocator::resolve() {
  changed_.clear();
  for (JobId id : leaving_) {
    if (transfers_[id].leaving) remove(id);
  }
  leaving_.clear();
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
      if (transfers_[id].active) take_up(id);
    }
    seeds_.resize(kept);
    fill();
    commit();
    if (active_at_.begin()->first < level_) seed_below();
  }
  for (JobId id : continued_) {
    if (transfers_[id].active) changed_.push_back(id);
  }
  continued_.clear();
  return changed_;
}

// Tells the links of a transfer that it does not stay where it stands.
void Allocator::take_up(JobId id) {
  touched_.push_back(id);
  for (const Slot& slot : transfers_[id].slots) {
    Member& member = links_[slot.link].members[slot.position];
    member.touched = true;
    member.standing = 0.0;
    member.held = kNever;
  }
}

// Lets a transfer rise again from where it stands.
void Allocator::touch(JobId id) {
  Transfer& t = transfers_[id];
  t.frozen = false;
  ++rising_;
  places_ += t.slots.size();
  for (const Slot& slot : t.slots) {
    Link& link = links_[slot.link];
    if (link.epoch != epoch_) open(slot.link);
    link.room += slot.weight * t.water;
    link.demand += slot.weight;
    ++link.rising;
  }
  if (t.ceiling == kNever) return;
  t.leaf = marks_.add(static_cast<std::uint32_t>(links_.size()) + id);
  marks_.set(t.leaf, t.ceiling);
}

// Makes the marks of its links subject to a transfer that is taken up late.
void Allocator::touch_in_mid_filling(JobId id) {
  take_up(id);
  touch(id);
  for (const Slot& slot : transfers_[id].slots) {
    const Link& link = links_[slot.link];
    note(slot.link, std::min(lowest_mark(link), link.old_mark));
  }
}

// The filling has to look at a link when it comes to this water, or before.
void Allocator::note(LinkId id, double water) {
  const std::uint32_t leaf = links_[id].leaf;
  if (water < marks_.key(leaf)) marks_.set(leaf, water);
}

// Sums up a link before the first of its members is touched.
void Allocator::open(LinkId id) {
  Link& link = links_[id];
  link.epoch = epoch_;
  opened_.push_back(id);
  link.demand = 0.0;
  link.rising = 0;
  link.leaf = marks_.add(id);
  places_ += link.members.size();
  double load = 0.0;
  double highest = 0.0;
  double old_mark = kNever;
  for (const Member& member : link.members) {
    if (member.level < level_) continue;
    load += member.weight * member.water;
    if (member.level > level_) continue;
    highest = std::max(highest, member.standing);
    old_mark = std::min(old_mark, member.held);
  }
  link.room = link.capacity - load;
  link.highest = highest;
  link.old_mark = old_mark;
  if (old_mark < kNever) ++old_marks_;
}

// A lower bound of the mark: as if the untouched members all froze where they did before.
double Allocator::lowest_mark(const Link& link) const {
  if (link.rising > 0) return std::max(link.room, 0.0) / link.demand;
  return overfull(link) ? 0.0 : kNever;
}

// The frozen leave less than the untouched had: these freeze lower than they did before.
bool Allocator::overfull(const Link& link) { return link.room < -kTolerance * link.capacity; }

bool Allocator::any_overfull() const {
  return std::any_of(opened_.begin(), opened_.end(),
                     [this](LinkId id) { return overfull(links_[id]); });
}

// The mark: where the link is full if its untouched members rise no higher than they did before.
double Allocator::mark(const Link& link) const {
  double mark = lowest_mark(link);
  if (mark >= link.highest) return mark;
  // Those that stood higher than the mark rise to it only, which raises it.
  for (;;) {
    double room = link.room;
    double demand = link.demand;
    double lowest = kNever;
    for (const Member& member : link.members) {
      const bool higher = member.level == level_ && member.standing > mark;
      const double weight = higher ? member.weight : 0.0;
      room += weight * member.standing;
      demand += weight;
      lowest = std::min(lowest, higher ? member.standing : kNever);
    }
    if (lowest == kNever) return link.rising > 0 ? mark : kNever;
    mark = std::max(room, 0.0) / demand;
    if (lowest > mark) return mark;
  }
}

// Water-filling of the touched, in the order in which links become full and ceilings are reached.
void Allocator::fill() {
  for (std::size_t i = 0; i < touched_.size(); ++i) touch(touched_[i]);
  for (LinkId id : opened_) note(id, std::min(lowest_mark(links_[id]), links_[id].old_mark));
  while (rising_ > 0 || old_marks_ > 0 || any_overfull()) {
    const std::uint32_t leaf = marks_.lowest_leaf();
    const double water = marks_.key(leaf);
    if (water == kNever) break;
    const std::uint32_t id = marks_.owner(leaf);
    if (id < links_.size()) {
      reach(id, water);
    } else {
      freeze(id - static_cast<std::uint32_t>(links_.size()), water, kOwnCeiling);
    }
  }
  marks_.clear();
}

// The filling has come to a mark noted for a link: is the link full here?
void Allocator::reach(LinkId id, double water) {
  Link& link = links_[id];
  marks_.set(link.leaf, kNever);
  double full_at = lowest_mark(link);
  if (!above(full_at, water)) full_at = mark(link);
  if (!above(link.old_mark, water)) {
    const double old_mark = std::exchange(link.old_mark, kNever);
    --old_marks_;
    if (above(full_at, old_mark)) {
      for (const Member& member : link.members) {
        if (member.level == level_ && member.held < kNever) touch_in_mid_filling(member.id);
      }
      note(id, lowest_mark(link));
      return;
    }
  }
  if (above(full_at, water)) {
    note(id, std::min(full_at, link.old_mark));
    return;
  }
  for (const Member& member : link.members) {
    if (member.level != level_) continue;
    if (above(member.standing, full_at)) touch_in_mid_filling(member.id);
    if (member.touched && !transfers_[member.id].frozen) freeze(member.id, full_at, id);
  }
  if (link.old_mark < kNever) {
    link.old_mark = kNever;
    --old_marks_;
  }
  marks_.set(link.leaf, kNever);
}

void Allocator::freeze(JobId id, double water, LinkId bottleneck) {
  Transfer& t = transfers_[id];
  t.frozen = true;
  t.next = water;
  t.next_bottleneck = bottleneck;
  --rising_;
  if (t.ceiling < kNever) marks_.set(t.leaf, kNever);
  for (const Slot& slot : t.slots) {
    Link& link = links_[slot.link];
    link.room -= slot.weight * water;
    link.demand -= slot.weight;
    // Where nobody rises any more only the old mark is left to look at.
    if (--link.rising == 0 && !overfull(link)) marks_.set(link.leaf, link.old_mark);
  }
}

void Allocator::commit() {
  changed_before_level_ = changed_.size();
  for (JobId id : touched_) {
    Transfer& t = transfers_[id];
    t.bottleneck = t.next_bottleneck;
    const double difference = t.next > t.water ? t.next - t.water : t.water - t.next;
    const bool changed = difference > kUnchanged * t.water;
    if (changed) {
      t.water = t.next;
      changed_.push_back(id);
    }
    for (const Slot& slot : t.slots) {
      Member& member = links_[slot.link].members[slot.position];
      member.water = t.water;
      member.standing = t.water;
      member.held = t.bottleneck == slot.link ? t.water : kNever;
      member.touched = false;
    }
  }
}

// Seeds the lower levels where the changed transfers leave over another rate than before.
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
        load += member.weight * member.water;
        lower = lower || member.level < level_;
      }
      if (!lower) continue;
      const bool overfull = above(load, link.capacity);
      for (const Member& member : link.members) {
        if (member.level >= level_) continue;
        if (overfull || member.held < kNever) seed(member.id);
      }
    }
  }
}

}  // namespace crux::fluid
