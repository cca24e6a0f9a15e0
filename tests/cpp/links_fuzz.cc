// The table of a host's link, which any process of its user may write: whatever it holds, nobody
// crashes, and nobody waits for longer than its patience.

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "../../csrc/links/link_table.h"
#include "../../csrc/process.h"
#include "check.h"
#include "fuzz.h"

namespace {

constexpr size_t kBytes = 8192;
constexpr int64_t kPatience_ns = 1'000'000;

struct Folder {
  Folder() { CHECK(mkdtemp(path.data()) != nullptr); }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string path =
      std::filesystem::exists("/dev/shm") ? "/dev/shm/crux-fuzz-XXXXXX" : "/tmp/crux-fuzz-XXXXXX";
};

struct Descriptor {
  explicit Descriptor(const std::string& path) : number(open(path.c_str(), O_RDWR | O_CLOEXEC)) {
    CHECK(number >= 0);
  }
  ~Descriptor() { close(number); }
  const int number;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  crux::Input input(data, size);
  const Folder folder;
  crux::LinkTable own(folder.path, "c", "link", 1), other(folder.path, "c", "link", 2);
  const Descriptor file(own.path());
  while (!input.empty()) {
    crux::LinkTable& table = input.up_to(1) == 0 ? own : other;
    switch (input.up_to(10)) {
      case 0: {
        const uint64_t word = input.take<uint64_t>();
        const auto at = static_cast<off_t>(input.take<uint16_t>() % (kBytes / 8) * 8);
        CHECK(pwrite(file.number, &word, sizeof word, at) == sizeof word);
        break;
      }
      case 1: {
        const auto level = static_cast<int8_t>(input.up_to(255));
        table.set_rank(crux::LinkTable::rank_at(level, input.number()));
        break;
      }
      case 2:
        table.mark();
        break;
      case 3:
        table.unmark();
        break;
      case 4:
        (void)table.hindered(kPatience_ns);
        break;
      case 5:
        (void)table.outranked();
        break;
      case 6:
        (void)table.shared();
        break;
      case 7:
        CHECK(table.holders().size() <= crux::LinkTable::kPlaces);
        break;
      case 8:
        table.exempt_until(input.take<int64_t>());
        break;
      case 9:
        table.retire();
        break;
      default:
        (void)table.rejoin(input.take<uint64_t>());
    }
  }
  const int64_t begin_ns = crux::monotonic_ns();
  own.sleep(begin_ns + kPatience_ns, kPatience_ns);
  // Seconds, for the machine may be busy.
  CHECK(crux::monotonic_ns() - begin_ns < 30'000'000'000);
  return 0;
}
