// Drives LLVMFuzzerTestOneInput where no libFuzzer is at hand: inputs that reach new code are kept
// and changed further.
//
//   NAME_fuzz SECONDS SEED CRASH INPUT...
//
// INPUT are files, and folders of files; with 0 SECONDS they are all that is run. An input that
// ends the process, or runs for a minute, is written to CRASH.

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "fuzz.h"

namespace {

using Bytes = std::vector<uint8_t>;
using Clock = std::chrono::steady_clock;

constexpr size_t kLongest = 4096;
constexpr unsigned kLimit_s = 60;
constexpr size_t kEdges = 1 << 16;

// What the process that runs the inputs leaves behind.
struct Shared {
  size_t size = 0;
  std::array<uint8_t, kLongest> data{};
  uint64_t runs = 0, kept = 0;
};

std::array<uint8_t, kEdges> hits{};
std::array<uint8_t, kEdges> known{};   // powers of two of the times that an edge was hit, as bits
std::array<size_t, kEdges> touched{};  // the first `touches` of them
size_t touches = 0;

uint8_t bucket(unsigned times) {
  unsigned bit = 0;
  while (times > 1 && bit < 7) {
    times >>= 1;
    ++bit;
  }
  return static_cast<uint8_t>(1U << bit);
}

// Whether the input reached code, or repeated it, as none has before.
bool reaches_more(Shared& shared, const Bytes& input) {
  shared.size = input.size();
  std::copy(input.begin(), input.end(), shared.data.begin());
  ++shared.runs;
  alarm(kLimit_s);
  LLVMFuzzerTestOneInput(shared.data.data(), shared.size);
  bool more = false;
  for (size_t n = 0; n < touches; ++n) {
    const size_t edge = touched[n];
    const uint8_t seen = bucket(hits[edge]);
    more |= (known[edge] & seen) == 0;
    known[edge] |= seen;
    hits[edge] = 0;
  }
  touches = 0;
  return more;
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  size_t below(size_t count) {
    return std::uniform_int_distribution<size_t>(0, count - 1)(random_);
  }

  Bytes change(const std::vector<Bytes>& corpus) {
    Bytes input = corpus[below(corpus.size())];
    for (size_t n = size_t{1} << below(4); n > 0; --n) change_once(input, corpus);
    if (input.size() > kLongest) input.resize(kLongest);
    return input;
  }

 private:
  void change_once(Bytes& input, const std::vector<Bytes>& corpus) {
    if (input.empty()) input.push_back(0);
    const size_t at = below(input.size());
    const size_t length = 1 + below(std::min<size_t>(input.size() - at, 32));
    const auto first = input.begin() + static_cast<ptrdiff_t>(at);
    const auto last = first + static_cast<ptrdiff_t>(length);
    static constexpr uint64_t kEdgeValues[] = {
        0, 1, 0x7f, 0xff, 0x7fff'ffff, UINT64_MAX, uint64_t{1} << 63, uint64_t{0x7ff} << 52};
    switch (below(8)) {
      case 0:
        *first ^= static_cast<uint8_t>(1U << below(8));
        break;
      case 1:
        *first = static_cast<uint8_t>(below(256));
        break;
      case 2:
        *first = static_cast<uint8_t>(*first + 35 - below(71));
        break;
      case 3:
        input.erase(first, last);
        break;
      case 4: {
        const Bytes copy(first, last);
        input.insert(input.begin() + static_cast<ptrdiff_t>(below(input.size() + 1)), copy.begin(),
                     copy.end());
        break;
      }
      case 5: {
        const uint64_t value = kEdgeValues[below(std::size(kEdgeValues))];
        std::memcpy(&*first, &value, std::min(sizeof value, input.size() - at));
        break;
      }
      case 6: {
        const Bytes& other = corpus[below(corpus.size())];
        if (other.empty()) break;
        const size_t from = below(other.size());
        const size_t taken = 1 + below(std::min<size_t>(other.size() - from, 64));
        const auto begin = other.begin() + static_cast<ptrdiff_t>(from);
        input.insert(first, begin, begin + static_cast<ptrdiff_t>(taken));
        break;
      }
      default:
        input.resize(at);
    }
  }

  std::mt19937_64 random_;
};

Bytes read(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  CHECK(stream);
  Bytes bytes{std::istreambuf_iterator<char>(stream), {}};
  bytes.resize(std::min(bytes.size(), kLongest));
  return bytes;
}

std::vector<Bytes> read_all(char** begin, char** end) {
  std::vector<std::filesystem::path> files;
  for (char** name = begin; name != end; ++name) {
    if (std::filesystem::is_directory(*name)) {
      for (const auto& entry : std::filesystem::directory_iterator(*name)) files.push_back(entry);
    } else {
      files.emplace_back(*name);
    }
  }
  std::sort(files.begin(), files.end());
  std::vector<Bytes> inputs;
  for (const auto& file : files) inputs.push_back(read(file));
  return inputs;
}

void run(Shared& shared, std::vector<Bytes> corpus, double seconds, uint64_t seed) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  for (const Bytes& input : corpus) (void)reaches_more(shared, input);
  Mutator mutator(seed);
  while (Clock::now() < end) {
    Bytes input = mutator.change(corpus);
    if (!reaches_more(shared, input)) continue;
    corpus.push_back(std::move(input));
    ++shared.kept;
  }
}

}  // namespace

// Called by all code that -fsanitize-coverage=trace-pc was used for.
extern "C" void __sanitizer_cov_trace_pc() {
  const auto place = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  const size_t edge = (place ^ place >> 16) % kEdges;
  if (hits[edge] == 0) touched[touches++] = edge;
  if (hits[edge] < UINT8_MAX) ++hits[edge];
}

int main(int count, char** words) {
  if (count < 5) {
    std::fprintf(stderr, "usage: %s SECONDS SEED CRASH INPUT...\n", words[0]);
    return 2;
  }
  void* const memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  auto& shared = *new (memory) Shared;
  const pid_t runner = fork();
  CHECK(runner >= 0);
  if (runner == 0) {
    run(shared, read_all(words + 4, words + count), std::atof(words[1]),
        std::strtoull(words[2], nullptr, 10));
    std::_Exit(0);
  }
  int status = 0;
  while (waitpid(runner, &status, 0) < 0) CHECK(errno == EINTR);
  const std::string name = std::filesystem::path(words[0]).filename().string();
  if (status == 0) {
    std::printf("%s: ok, %llu inputs, %llu reached more code\n", name.c_str(),
                static_cast<unsigned long long>(shared.runs),
                static_cast<unsigned long long>(shared.kept));
    return 0;
  }
  std::ofstream(words[3], std::ios::binary)
      .write(reinterpret_cast<const char*>(shared.data.data()),
             static_cast<std::streamsize>(shared.size));
  std::fprintf(stderr, "%s: seed %s, input %llu %s; it is in %s\n", name.c_str(), words[2],
               static_cast<unsigned long long>(shared.runs),
               WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM ? "runs for a minute" : "failed",
               words[3]);
  return 1;
}
