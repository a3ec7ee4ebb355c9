// Threads that share the work of a pass, part by part.
//
// A part is done when its work is done, not when every thread has come by: a thread that other programs keep from
// running delays a part only while it holds a piece of it. Barriers would make all threads wait for it every time.
#pragma once
#include <sched.h>

#include <atomic>
#include <functional>
#include <memory>

#include "vector.h"

// Runs `work` in the calling thread and in up to threads - 1 others; returns when all that have begun have ended. The
// others sleep between calls. If another call is under way, the calling thread works alone.
void run_together(long threads, const std::function<void()>& work);

INLINE void pause_thread() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Team {
 public:
  Team(long parts, long threads) : threads(threads), part(new Part[parts]) {}

  // Calls run(member) in every thread. A member must share the same parts in the same order as all others.
  template <typename Run>
  void start(Run run) {
    run_together(threads, [&] { run(Member{*this}); });
  }

  class Member {
   public:
    explicit Member(Team& team) : team(team) {}

    // work(i) for every i below `count`, then end() in one thread; wait until all of it is done. Threads take neighbouring
    // units together, because the hardware reads ahead along memory: many at first, and fewer towards the end, so that
    // all threads end at about the same time.
    template <typename Work, typename End>
    void share(long count, Work work, End end) {
      Part& part = team.part[at++];
      for (long from = part.next.load(std::memory_order_relaxed); from < count;) {
        long left = count - from, chunk = team.threads == 1 ? left : (left + 2 * team.threads - 1) / (2 * team.threads);
        if (!part.next.compare_exchange_weak(from, from + chunk, std::memory_order_relaxed)) continue;
        for (long i = from; i < from + chunk; i++) work(i);
        if (part.done.fetch_add(chunk, std::memory_order_acq_rel) + chunk == count) {
          end();
          part.ended.store(true, std::memory_order_release);
        }
        from = part.next.load(std::memory_order_relaxed);
      }
      for (long turns = 0; count && !part.ended.load(std::memory_order_acquire); turns++) {
        if (turns < PATIENCE) pause_thread();
        else sched_yield();
      }
    }
    template <typename Work>
    void share(long count, Work work) {
      share(count, work, [] {});
    }

   private:
    Team& team;
    long at = 0;
  };

 private:
  static constexpr long PATIENCE = 200;  // turns before a waiting thread offers its core to others: about 10 µs
  struct alignas(128) Part {             // apart, so that threads do not fight for one cache line
    std::atomic<long> next{0}, done{0};
    std::atomic<bool> ended{false};
  };
  long threads;
  std::unique_ptr<Part[]> part;
};
