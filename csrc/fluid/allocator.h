#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "mark_tree.h"
#include "sharing.h"
#include "spec.h"

namespace crux::fluid {

// Rates of the transfers that are moving: strict priority between levels, weighted max-min
// (water-filling) within one.
//
// A transfer's water is its rate on its busiest link divided by its weight. Water-filling raises
// all transfers of a level together; a link that becomes full freezes those that cross it and still
// rise, at its mark. resolve() replays that filling for what an event changed only, in the order of
// the marks. A transfer is taken up ("touched") when the link that froze it is no longer full at
// its old mark, or when another link now is full below it; everybody else freezes where it did
// before and need not be looked at. Then follow the levels below, on the links that changed.
class Allocator {
 public:
  explicit Allocator(const Network& network);

  // A transfer starts to move over those of its crossings that are contended. ceiling_Bps bounds
  // its rate on the busiest link. `crossings` must outlive the transfer.
  void start(JobId id, int level, double weight, double ceiling_Bps,
             const std::vector<Crossing>& crossings, const Sharing& sharing);
  // One that starts again before resolve(), with the same needs, keeps its rate: a job that sends
  // burst after burst disturbs nobody.
  void stop(JobId id);
  bool active(JobId id) const {
    return id < transfers_.size() && transfers_[id].active && !transfers_[id].leaving;
  }

  // Brings the rates up to date; returns the transfers that started or whose rate changed.
  const std::vector<JobId>& resolve();
  bool settled() const { return seeds_.empty() && leaving_.empty() && continued_.empty(); }

  // Places that transfers have on links, each as often as it was looked at.
  std::uint64_t places() const { return places_; }

  // Rate on the transfer's busiest link, in bytes per second.
  double rate_Bps(JobId id) const { return transfers_[id].water * transfers_[id].weight; }

 private:
  static constexpr LinkId kOwnCeiling = UINT32_MAX;
  static constexpr LinkId kNone = UINT32_MAX - 1;
  static constexpr double kNever = MarkTree::kNever;

  struct Slot {
    LinkId link;
    std::uint32_t position;  // among the link's members
    double weight;           // bytes/s on this link for one unit of water
  };
  struct Transfer {
    double water = 0.0;
    double next = 0.0;  // water in the filling under way, once frozen
    double ceiling = kNever;
    double weight = 1.0;
    int level = 0;
    LinkId bottleneck = kNone;
    LinkId next_bottleneck = kNone;
    bool active = false;
    bool leaving = false;  // it stopped after the last resolve()
    bool seeded = false;
    bool frozen = false;
    std::uint32_t leaf = 0;  // among the marks
    std::vector<Slot> slots;
  };
  // A transfer as a link that it crosses sees it; those of a link lie side by side.
  struct Member {
    double weight;
    double water;
    double standing;  // its water; 0 while it is touched
    double held;      // its water if the link is its bottleneck; kNever if not, or while touched
    JobId id;
    std::uint32_t slot;
    int level;
    bool touched;
  };
  struct Link {
    double capacity;
    std::uint64_t epoch = 0;   // == epoch_: some member is touched
    double room = 0.0;         // left by higher levels, untouched and frozen members
    double demand = 0.0;       // of the rising members, for one unit of water
    std::uint32_t rising = 0;  // touched members that are not frozen
    double highest = 0.0;      // no untouched member of the level stood higher
    double old_mark = 0.0;     // where it froze untouched members; kNever: nobody, or looked at
    std::uint32_t leaf = 0;    // among the marks
    std::vector<Member> members;
  };
  struct Need {
    LinkId link;
    double weight;
  };
  double need(double weight, double ceiling_Bps, const std::vector<Crossing>& crossings,
              const Sharing& sharing);
  bool needs_the_same(const Transfer& t, int level, double weight, double ceiling) const;
  void remove(JobId id);
  void seed(JobId id);
  void take_up(JobId id);
  void touch(JobId id);
  void touch_in_mid_filling(JobId id);
  void note(LinkId id, double water);
  void open(LinkId id);
  double lowest_mark(const Link& link) const;
  double mark(const Link& link) const;
  static bool overfull(const Link& link);
  bool any_overfull() const;
  void reach(LinkId id, double water);
  void freeze(JobId id, double water, LinkId bottleneck);
  void fill();
  void commit();
  void seed_below();

  std::vector<Transfer> transfers_;
  std::vector<Link> links_;
  std::vector<Need> needs_;  // of the transfer that starts
  std::vector<JobId> leaving_;
  std::vector<JobId> continued_;
  std::vector<JobId> seeds_;
  std::vector<JobId> touched_;
  std::vector<LinkId> opened_;
  MarkTree marks_;  // of opened links, and of touched transfers that have a ceiling
  std::map<int, std::size_t> active_at_;  // transfers of each level
  std::vector<JobId> changed_;
  std::size_t changed_before_level_ = 0;
  std::size_t old_marks_ = 0;  // links whose old mark the filling has not come to
  std::size_t rising_ = 0;     // touched transfers that are not frozen
  std::uint64_t epoch_ = 0;
  std::uint64_t places_ = 0;
  int level_ = 0;  // being filled
};

}  // namespace crux::fluid
