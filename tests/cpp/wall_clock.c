// Preloaded, it makes a program's wall clock wrong: at WALL_CLOCK_SINCE_S it is WALL_CLOCK_AHEAD_S
// ahead, and it runs WALL_CLOCK_RATE times as fast. Clocks that never go back stay right.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const double BILLION = 1e9;
static double since_s, ahead_s, rate;

__attribute__((constructor)) static void read_variables(void) {
  since_s = atof(getenv("WALL_CLOCK_SINCE_S"));
  ahead_s = atof(getenv("WALL_CLOCK_AHEAD_S"));
  rate = atof(getenv("WALL_CLOCK_RATE"));
}

static double shift_s(double now_s) { return ahead_s + (now_s - since_s) * (rate - 1.0); }

static double seconds(const struct timespec* at) { return at->tv_sec + at->tv_nsec / BILLION; }

static void shift(struct timespec* at, double by_s) {
  const double shifted_s = seconds(at) + by_s;
  at->tv_sec = (time_t)shifted_s;
  at->tv_nsec = (long)((shifted_s - (double)at->tv_sec) * BILLION);
}

int clock_gettime(clockid_t clock, struct timespec* at) {
  const int result = (int)syscall(SYS_clock_gettime, clock, at);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    shift(at, shift_s(seconds(at)));
  return result;
}

time_t time(time_t* out) {
  struct timespec at;
  clock_gettime(CLOCK_REALTIME, &at);
  if (out != NULL) *out = at.tv_sec;
  return at.tv_sec;
}

int gettimeofday(struct timeval* restrict out, void* restrict zone) {
  (void)zone;
  struct timespec at;
  clock_gettime(CLOCK_REALTIME, &at);
  out->tv_sec = at.tv_sec;
  out->tv_usec = at.tv_nsec / 1000;
  return 0;
}

// A deadline by the wrong clock is one by the kernel's. Those of the other clocks are small.
int pthread_cond_timedwait(pthread_cond_t* restrict condition, pthread_mutex_t* restrict mutex,
                           const struct timespec* restrict deadline) {
  static int (*next)(pthread_cond_t*, pthread_mutex_t*, const struct timespec*);
  if (next == NULL) next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  if (next == NULL) next = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  struct timespec real = *deadline, now;
  if (seconds(deadline) > BILLION) {
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
    shift(&real, -shift_s(seconds(&now)));
  }
  return next(condition, mutex, &real);
}
