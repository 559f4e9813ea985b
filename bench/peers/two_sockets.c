// Moves the bytes of each collective between two processes over one loopback connection in the simplest possible loop:
// no library, no sums, only non-blocking write() and read(), each process bound to a core. This is the cost of the kernel's
// TCP.
//   two_sockets LEAST MOST FACTOR      prints a line of JSON for each operation and size
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static double now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void fail(const char* what) {
  perror(what);
  exit(1);
}

// Sends and receives `bytes` at the same time, as much per call as the socket accepts.
static void exchange(int s, const char* in, char* out, size_t bytes) {
  size_t sent = 0, got = 0;
  while (sent < bytes || got < bytes) {
    ssize_t n = sent < bytes ? write(s, in + sent, bytes - sent) : 0;
    if (n < 0 && errno != EAGAIN) fail("write");
    if (n > 0) sent += (size_t)n;
    n = got < bytes ? read(s, out + got, bytes - got) : 0;
    if (n < 0 && errno != EAGAIN) fail("read");
    if (n > 0) got += (size_t)n;
  }
}

static int by_value(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const size_t least = strtoull(argv[1], NULL, 10), most = strtoull(argv[2], NULL, 10), factor = strtoull(argv[3], NULL, 10);
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  if (bind(listener, (struct sockaddr*)&address, length) != 0 || listen(listener, 1) != 0) fail("listen");
  getsockname(listener, (struct sockaddr*)&address, &length);
  const int second = fork() == 0;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(second, &cores);
  sched_setaffinity(0, sizeof cores, &cores);
  int s = second ? socket(AF_INET, SOCK_STREAM, 0) : accept(listener, NULL, NULL);
  if (second && connect(s, (struct sockaddr*)&address, sizeof address) != 0) fail("connect");
  const int one = 1;
  setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  fcntl(s, F_SETFL, O_NONBLOCK);
  char* in = malloc(most);
  char* out = malloc(most);
  memset(in, 1, most);
  memset(out, 1, most);
  const struct { const char* op; int exchanges; } ops[] = {{"all_reduce", 2}, {"all_gather", 1}, {"reduce_scatter", 1}};
  for (size_t o = 0; o < 3; ++o)
    for (size_t bytes = least; bytes <= most; bytes *= factor) {
      const int rounds = bytes > (8u << 20) ? 20 : bytes > (256u << 10) ? 200 : 2000;
      double* times = malloc((size_t)rounds * sizeof(double));
      for (int i = -rounds / 10; i < rounds; ++i) {
        const double begin = now_us();
        for (int e = 0; e < ops[o].exchanges; ++e) exchange(s, in, out, bytes / 2);
        if (i >= 0) times[i] = now_us() - begin;
      }
      qsort(times, (size_t)rounds, sizeof(double), by_value);
      if (!second) printf("{\"op\": \"%s\", \"bytes\": %zu, \"time_us\": %.3f}\n", ops[o].op, bytes, times[rounds / 2]);
      free(times);
    }
  return 0;
}
