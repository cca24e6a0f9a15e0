// Opens connections as NCCL does over sockets (src/bootstrap.cc, src/transport/net_socket.cc and
// src/misc/socket.cc): built as libnccl.so.2 and loaded with dlopen, it reaches connect() and
// accept() through its dynamic imports. It computes nothing.
//
// A communicator has a bootstrap connection to its neighbour, made on the thread that makes the
// communicator, and a service thread. The connections for data are made by that thread when the
// first operation needs them: NCCL_SOCKET_NTHREADS × NCCL_NSOCKS_PERTHREAD for data and one for
// sizes, each connected without blocking and greeted with a magic number, a type and its index.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace {

constexpr uint64_t kMagic = 0x564ab9f2fc4b9d6c;
constexpr int32_t kTypeNetSocket = 3;
constexpr int kPollMs = 10000;

int checked(int result, const char* what) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), what);
  return result;
}

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  Socket(Socket&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int fd() const { return fd_; }

  static Socket make() {
    Socket made(checked(::socket(AF_INET, SOCK_STREAM, 0), "socket"));
    made.prepare();
    return made;
  }

  void prepare() const {
    const int one = 1;
    checked(::setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one), "TCP_NODELAY");
    const int flags = checked(::fcntl(fd_, F_GETFL), "F_GETFL");
    checked(::fcntl(fd_, F_SETFL, flags | O_NONBLOCK), "F_SETFL");
  }

  void wait(short events) const {
    pollfd ready{fd_, events, 0};
    if (checked(::poll(&ready, 1, kPollMs), "poll") == 0) {
      throw std::system_error(ETIMEDOUT, std::generic_category(), "poll");
    }
  }

  void move(bool out, void* data, size_t size) const {
    auto* at = static_cast<char*>(data);
    while (size > 0) {
      const ssize_t done = out ? ::send(fd_, at, size, MSG_NOSIGNAL) : ::recv(fd_, at, size, 0);
      if (done > 0) {
        at += done;
        size -= static_cast<size_t>(done);
      } else if (done == 0) {
        throw std::system_error(ECONNRESET, std::generic_category(), "recv");
      } else if (errno == EAGAIN) {
        wait(out ? POLLOUT : POLLIN);
      } else {
        checked(-1, out ? "send" : "recv");
      }
    }
  }

 private:
  int fd_ = -1;
};

sockaddr_in ipv4(const char* text, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = ::htons(static_cast<uint16_t>(port));
  if (::inet_pton(AF_INET, text, &address.sin_addr) != 1) {
    throw std::system_error(EINVAL, std::generic_category(), "inet_pton");
  }
  return address;
}

Socket connected(const sockaddr_in& address, uint8_t index) {
  Socket made = Socket::make();
  const auto* generic = reinterpret_cast<const sockaddr*>(&address);
  if (::connect(made.fd(), generic, sizeof address) != 0) {
    if (errno != EINPROGRESS) checked(-1, "connect");
    made.wait(POLLOUT);
    int error = 0;
    socklen_t size = sizeof error;
    checked(::getsockopt(made.fd(), SOL_SOCKET, SO_ERROR, &error, &size), "SO_ERROR");
    if (error != 0) throw std::system_error(error, std::generic_category(), "connect");
  }
  uint64_t magic = kMagic;
  int32_t type = kTypeNetSocket;
  made.move(true, &magic, sizeof magic);
  made.move(true, &type, sizeof type);
  made.move(true, &index, sizeof index);
  return made;
}

class Listener {
 public:
  explicit Listener(const char* own) : socket_(Socket::make()) {
    const sockaddr_in address = ipv4(own, 0);
    checked(::bind(socket_.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address),
            "bind");
    checked(::listen(socket_.fd(), 128), "listen");
  }

  int port() const {
    sockaddr_in address{};
    socklen_t size = sizeof address;
    checked(::getsockname(socket_.fd(), reinterpret_cast<sockaddr*>(&address), &size),
            "getsockname");
    return ::ntohs(address.sin_port);
  }

  Socket accepted(uint8_t& index) const {
    socket_.wait(POLLIN);
    Socket made(checked(::accept(socket_.fd(), nullptr, nullptr), "accept"));
    made.prepare();
    uint64_t magic = 0;
    int32_t type = 0;
    made.move(false, &magic, sizeof magic);
    made.move(false, &type, sizeof type);
    made.move(false, &index, sizeof index);
    if (magic != kMagic || type != kTypeNetSocket) {
      throw std::system_error(EPROTO, std::generic_category(), "greeting");
    }
    return made;
  }

 private:
  Socket socket_;
};

class Communicator {
 public:
  Communicator(const char* own, int threads, int per_thread)
      : threads_(threads),
        count_(threads * per_thread),
        bootstrap_listener_(own),
        data_listener_(std::make_unique<Listener>(own)) {}
  ~Communicator() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    if (service_.joinable()) service_.join();
  }

  int bootstrap_port() const { return bootstrap_listener_.port(); }
  int data_port() const { return data_listener_->port(); }

  // As ncclCommInitRank: the ring of two ranks, and the service.
  void initialize(const sockaddr_in& peer) {
    uint8_t index = 0;
    bootstrap_.push_back(connected(peer, 0));
    bootstrap_.push_back(bootstrap_listener_.accepted(index));
    service_ = std::thread([this] { serve(); });
  }

  // As the first operation: the service connects, the caller waits.
  void connect_peer(const sockaddr_in& peer) {
    std::unique_lock<std::mutex> lock(mutex_);
    task_ = [this, peer] {
      for (int i = 0; i <= count_; ++i) sends_.push_back(connected(peer, i));
      receives_.resize(count_ + 1);
      for (int i = 0; i <= count_; ++i) {
        uint8_t index = 0;
        Socket made = data_listener_->accepted(index);
        receives_.at(index) = std::move(made);
      }
      data_listener_.reset();  // NCCL closes it once all have come
    };
    wake_.notify_all();
    wake_.wait(lock, [this] { return !task_; });
    if (failure_) std::rethrow_exception(failure_);
  }

  // Both ways at once, in equal parts on all sockets for data, by helper threads.
  void transfer(size_t bytes) {
    uint64_t size = bytes, told = 0;
    sends_[count_].move(true, &size, sizeof size);
    receives_[count_].move(false, &told, sizeof told);
    std::vector<std::thread> helpers;
    std::vector<int> failed(2 * threads_, 0);
    for (int t = 0; t < 2 * threads_; ++t) {
      helpers.emplace_back([this, t, bytes, &failed] {
        const bool out = t < threads_;
        std::vector<char> part(bytes / count_, out ? 'x' : 0);
        try {
          for (int i = t % threads_; i < count_; i += threads_) {
            (out ? sends_ : receives_)[i].move(out, part.data(), part.size());
          }
        } catch (const std::exception&) {
          failed[t] = 1;
        }
      });
    }
    for (std::thread& helper : helpers) helper.join();
    for (int one : failed) {
      if (one) throw std::system_error(EIO, std::generic_category(), "transfer");
    }
  }

  int descriptors(int* out, int capacity) const {
    int found = 0;
    for (const auto* sockets : {&bootstrap_, &sends_, &receives_}) {
      for (const Socket& socket : *sockets) {
        if (found < capacity) out[found] = socket.fd();
        ++found;
      }
    }
    return found;
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stop_) {
      if (task_) {
        try {
          task_();
        } catch (const std::exception&) {
          failure_ = std::current_exception();
        }
        task_ = nullptr;
        wake_.notify_all();
      }
      wake_.wait(lock, [this] { return stop_ || task_; });
    }
  }

  const int threads_, count_;
  Listener bootstrap_listener_;
  std::unique_ptr<Listener> data_listener_;
  std::vector<Socket> bootstrap_, sends_, receives_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::function<void()> task_;
  std::exception_ptr failure_;
  bool stop_ = false;
  std::thread service_;
};

template <typename Work>
int guarded(const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::system_error& error) {
    return error.code().value();
  }
}

}  // namespace

extern "C" {

// Null where the address can't be listened at.
void* fake_nccl_new(const char* own, int threads, int per_thread) {
  void* made = nullptr;
  guarded([&] { made = new Communicator(own, threads, per_thread); });
  return made;
}
int fake_nccl_bootstrap_port(void* c) { return static_cast<Communicator*>(c)->bootstrap_port(); }
int fake_nccl_data_port(void* c) { return static_cast<Communicator*>(c)->data_port(); }
int fake_nccl_initialize(void* c, const char* peer, int port) {
  return guarded([&] { static_cast<Communicator*>(c)->initialize(ipv4(peer, port)); });
}
int fake_nccl_connect(void* c, const char* peer, int port) {
  return guarded([&] { static_cast<Communicator*>(c)->connect_peer(ipv4(peer, port)); });
}
int fake_nccl_transfer(void* c, size_t bytes) {
  return guarded([&] { static_cast<Communicator*>(c)->transfer(bytes); });
}
int fake_nccl_descriptors(void* c, int* out, int capacity) {
  return static_cast<Communicator*>(c)->descriptors(out, capacity);
}
void fake_nccl_delete(void* c) { delete static_cast<Communicator*>(c); }

}  // extern "C"
