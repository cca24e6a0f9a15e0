// Threads that connect, accept, fork, spawn, cancel each other and jump, while signals hit them
// whose handlers connect, accept, fork and post, too. It ends with the library as without.
//
//   signal_storm SEED SECONDS [fork]      fork: only children that fork() makes, and posix_spawn()
//
// Exit status 0, or 1 and a line that says which call hangs or which child died.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <vector>

#include "../../csrc/transport/crux_transport.h"

namespace {

constexpr int kWorkers = 3;
constexpr int kPatience_s = 20;

// Null where the library or the client of verbs is not loaded.
decltype(&crux_transport_connections) list_connections;
decltype(&crux_transport_set_routes) set_routes;
decltype(&crux_transport_set_socket) set_socket;
bool (*client_pair)(uint8_t);
int (*client_post_one)(int, uint32_t);

sockaddr_in address{};
int listener = -1, silent = -1;
bool only_fork = false;
std::atomic<bool> stop{false};

struct Worker {
  pthread_t thread;
  int number;
  std::atomic<const char*> doing{"starting"};
};
Worker workers[kWorkers];

thread_local uint64_t state = 0;
thread_local int self = -1;
thread_local sigjmp_buf back;
thread_local volatile sig_atomic_t may_jump = 0;

uint32_t draw(uint32_t below) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 33) % below;
}

[[noreturn]] void fail(const char* what, const char* about) {
  std::fprintf(stderr, "signal_storm: %s: %s\n", what, about);
  ::_exit(1);
}

// For handlers and children: async-signal-safe.
int connected(int flags) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | flags, 0);
  const linger at_once{1, 0};
  ::setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  ::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address);
  return fd;
}

void connect_and_close() { ::close(connected(SOCK_NONBLOCK)); }

void reap(pid_t child, const char* how) {
  int status = 0;
  while (::waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) fail("waitpid", std::strerror(errno));
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) fail("a child hangs or died", how);
}

// What hangs in a child ends it.
[[noreturn]] void in_child(bool pairs) {
  ::signal(SIGALRM, SIG_DFL);
  ::alarm(kPatience_s);
  connect_and_close();
  if (pairs && client_pair != nullptr && !client_pair(0)) ::_exit(2);
  if (pairs && list_connections != nullptr) list_connections(nullptr, 0);
  ::_exit(0);
}

pid_t raw_clone() { return static_cast<pid_t>(::syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0)); }

void on_signal(int) {
  const int before = errno;
  switch (draw(10)) {
    case 0: {
      const int fd = ::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK);
      if (fd >= 0) ::close(fd);
      break;
    }
    case 1:
      ::close(::dup(listener));
      break;
    case 2: {
      // Without the handlers of pthread_atfork(): fork() is not for signal handlers.
      const pid_t child = only_fork || draw(8) != 0 ? -1 : raw_clone();
      if (child == 0) in_child(false);
      if (child > 0) reap(child, "clone() in a signal handler");
      break;
    }
    case 3:
      if (client_post_one != nullptr) client_post_one(2 * self + 1, 1);
      break;
    default:
      connect_and_close();
  }
  errno = before;
  if (may_jump != 0) {
    may_jump = 0;
    ::siglongjmp(back, 1);
  }
}

void* waits(void* accepts) {
  // Both are cancellation points.
  for (;;) {
    if (accepts != nullptr) {
      ::accept(silent, nullptr, nullptr);
    } else {
      const int fd = connected(0);
      ::close(fd);
    }
  }
}

void cancel_a_thread() {
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t other;
  const int made = ::pthread_create(&other, nullptr, waits, draw(2) ? &stop : nullptr);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (made != 0) return;
  ::usleep(draw(500));
  ::pthread_cancel(other);
  ::pthread_join(other, nullptr);
}

void jump_out_of_accept() {
  if (::sigsetjmp(back, 1) != 0) return;
  may_jump = 1;
  while (may_jump != 0) {
    const int fd = ::accept(silent, nullptr, nullptr);
    if (fd >= 0) ::close(fd);
  }
}

void change_routes() {
  crux_route route{};
  std::strcpy(route.destination, "127.0.0.1");
  route.dscp = static_cast<int32_t>(draw(64));
  route.rate_Bps = draw(2) ? 0 : 1'000'000'000;
  route.hop_count = draw(8) == 0;
  route.hops[0].ttl = 1;
  std::strcpy(route.hops[0].address, "192.0.2.1");
  if (set_routes(&route, draw(4) != 0) != 0) fail("set_routes", "refused");
}

bool is_listed(uint64_t inode) {
  std::vector<crux_connection> all(list_connections(nullptr, 0) + 256);
  const size_t count = list_connections(all.data(), all.size());
  for (size_t i = 0; i < count && i < all.size(); ++i) {
    if (all[i].id == inode) return true;
  }
  return false;
}

uint64_t inode_of(int fd) {
  struct stat status{};
  ::fstat(fd, &status);
  return status.st_ino;
}

void spawn() {
  char program[] = "/bin/true";
  char* const arguments[] = {program, nullptr};
  char* const nothing[] = {nullptr};
  pid_t child = 0;
  if (::posix_spawn(&child, program, nullptr, nullptr, arguments, nothing) == 0)
    reap(child, "posix_spawn()");
}

void fork_by_vfork() {
  const pid_t child = ::vfork();
  if (child == 0) ::_exit(0);
  if (child > 0) reap(child, "vfork()");
}

struct Action {
  const char* name;
  void (*act)();
};
const Action kActions[] = {
    {"connect()", [] { ::close(connected(draw(2) ? SOCK_NONBLOCK : 0)); }},
    {"connect() again", [] { ::close(connected(SOCK_NONBLOCK)); }},
    {"crux_transport_connections()",
     [] {
       if (list_connections) list_connections(nullptr, 0);
     }},
    {"crux_transport_set_routes()",
     [] {
       if (set_routes) change_routes();
     }},
    {"crux_transport_set_socket()",
     [] {
       const int fd = connected(SOCK_NONBLOCK);
       if (set_socket) set_socket(fd, inode_of(fd), static_cast<int32_t>(draw(64)), 0, nullptr);
       ::close(fd);
     }},
    {"fork()",
     [] {
       const pid_t child = ::fork();
       if (child == 0) in_child(true);
       if (child > 0) reap(child, "fork()");
     }},
    {"clone()",
     [] {
       const pid_t child = only_fork ? -1 : raw_clone();
       if (child == 0) in_child(false);
       if (child > 0) reap(child, "clone()");
     }},
    {"vfork()", fork_by_vfork},
    {"posix_spawn()", spawn},
    {"pthread_cancel()", cancel_a_thread},
    {"siglongjmp()", jump_out_of_accept},
    {"ibv_post_send()",
     [] {
       if (client_post_one) client_post_one(2 * self, 1);
     }},
};
constexpr uint32_t kActionCount = sizeof kActions / sizeof *kActions;

void* work(void* of) {
  Worker& worker = *static_cast<Worker*>(of);
  self = worker.number;
  state = state * 31 + static_cast<uint64_t>(worker.number) + 1;
  sigset_t hits;
  ::sigemptyset(&hits);
  ::sigaddset(&hits, SIGUSR1);
  ::sigaddset(&hits, SIGUSR2);
  ::pthread_sigmask(SIG_UNBLOCK, &hits, nullptr);
  while (!stop) {
    const Action& action = kActions[draw(kActionCount)];
    worker.doing = action.name;
    action.act();
  }
  ::pthread_sigmask(SIG_BLOCK, &hits, nullptr);
  // Nothing of all this has kept the library from seeing this thread's connections.
  worker.doing = "the last connect()";
  const int fd = connected(SOCK_NONBLOCK);
  if (list_connections != nullptr && !is_listed(inode_of(fd))) fail("not listed", worker.doing);
  ::close(fd);
  return nullptr;
}

void* drain(void*) {
  for (;;) {
    pollfd waiting{listener, POLLIN, 0};
    ::poll(&waiting, 1, -1);
    const int fd = ::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK);
    if (fd >= 0) ::close(fd);
  }
}

int listening(int flags) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | flags, 0);
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::bind(fd, reinterpret_cast<sockaddr*>(&any), sizeof any) != 0 || ::listen(fd, 512) != 0)
    fail("listen", std::strerror(errno));
  return fd;
}

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
}

double now_s() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  state = std::strtoull(argv[1], nullptr, 10);
  only_fork = argc > 3;
  find(RTLD_DEFAULT, "crux_transport_connections", list_connections);
  find(RTLD_DEFAULT, "crux_transport_set_routes", set_routes);
  find(RTLD_DEFAULT, "crux_transport_set_socket", set_socket);
  if (const char* const path = std::getenv("VERBS_CLIENT")) {
    void* const client = ::dlopen(path, RTLD_NOW);
    if (client == nullptr) fail("dlopen", ::dlerror());
    find(client, "client_pair", client_pair);
    find(client, "client_post_one", client_post_one);
    for (int i = 0; i < kWorkers; ++i) {
      if (!client_pair(0)) fail("client_pair", "refused");
    }
  }
  listener = listening(SOCK_NONBLOCK);
  silent = listening(0);
  socklen_t size = sizeof address;
  ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);

  struct sigaction action{};
  action.sa_handler = on_signal;
  ::sigaction(SIGUSR2, &action, nullptr);
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGUSR1, &action, nullptr);
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t drainer;
  ::pthread_create(&drainer, nullptr, drain, nullptr);
  for (int i = 0; i < kWorkers; ++i) {
    workers[i].number = i;
    ::pthread_create(&workers[i].thread, nullptr, work, &workers[i]);
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);

  const double end_s = now_s() + std::atof(argv[2]);
  uint64_t signals = 0;
  while (now_s() < end_s) {
    ::pthread_kill(workers[draw(kWorkers)].thread, draw(2) ? SIGUSR1 : SIGUSR2);
    ++signals;
    ::usleep(20 + draw(200));
  }
  stop = true;
  for (Worker& worker : workers) {
    const double late_s = now_s() + kPatience_s;
    // Who waits in accept() needs a signal to jump.
    while (::pthread_tryjoin_np(worker.thread, nullptr) != 0) {
      if (now_s() > late_s) fail("hangs", worker.doing.load());
      ::pthread_kill(worker.thread, SIGUSR2);
      ::usleep(1000);
    }
  }
  std::printf("%llu signals\n", static_cast<unsigned long long>(signals));
  return 0;
}
