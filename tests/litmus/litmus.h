// What the litmus programs share. CONTROL is 0 for the protocol as the code has it, or the number of a negative
// control: a program lists its own.
#ifndef TESSERA_TESTS_LITMUS_H
#define TESSERA_TESTS_LITMUS_H

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#ifndef CONTROL
#define CONTROL 0
#endif

#define RELAXED memory_order_relaxed
#define ACQUIRE memory_order_acquire
#define RELEASE memory_order_release
#define ACQ_REL memory_order_acq_rel
#define SEQ_CST memory_order_seq_cst
/// The order that the code uses, or in control `number` a weaker one.
#define ORDER(number, code, weaker) (CONTROL == (number) ? (weaker) : (code))

#define load(object, order) atomic_load_explicit(object, order)
#define store(object, value, order) atomic_store_explicit(object, value, order)
#define exchange(object, value, order) atomic_exchange_explicit(object, value, order)
#define add(object, value, order) atomic_fetch_add_explicit(object, value, order)
#define sub(object, value, order) atomic_fetch_sub_explicit(object, value, order)
#define fence(order) atomic_thread_fence(order)

/// A thread that sleeps in the kernel. `asleep` at the end of the program: a wake-up was lost.
typedef struct {
  pthread_mutex_t queue;
  bool asleep;
} Sleep;
#define SLEEP_INIT \
  { PTHREAD_MUTEX_INITIALIZER, false }

/// FUTEX_WAIT: the kernel compares the word under the lock of its queue.
static inline void futex_wait(Sleep* thread, atomic_uint* word, unsigned seen) {
  pthread_mutex_lock(&thread->queue);
  if (load(word, RELAXED) == seen) thread->asleep = true;
  pthread_mutex_unlock(&thread->queue);
}

/// FUTEX_WAKE. The caller has changed the word.
static inline void futex_wake(Sleep* thread) {
  pthread_mutex_lock(&thread->queue);
  thread->asleep = false;
  pthread_mutex_unlock(&thread->queue);
}

/// Runs one thread for each function.
static inline void run_threads(void* (*const* threads)(void*), size_t count) {
  pthread_t ids[4];
  for (size_t i = 0; i < count; ++i) pthread_create(&ids[i], NULL, threads[i], NULL);
  for (size_t i = 0; i < count; ++i) pthread_join(ids[i], NULL);
}
#define RUN(...)                                  \
  do {                                            \
    void* (*const all[])(void*) = {__VA_ARGS__};  \
    run_threads(all, sizeof all / sizeof all[0]); \
  } while (0)

#endif
