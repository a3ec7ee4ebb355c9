// Threads that share the work of a pass, part by part.
//
// A part is done when its work is done, not when every thread has come by: a thread that other programs keep from
// running delays a part only while it holds a piece of it. Barriers would make all threads wait for it every time.
#pragma once
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <memory>

class Team {
 public:
  Team(long parts, long threads) : threads(threads), part(new Part[parts]) {}

  // Calls run(member) in every thread. A member must share the same parts in the same order as all others.
  template <typename Run>
  void start(Run run) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    run(Member{*this});
  }

  class Member {
   public:
    explicit Member(Team& team) : team(team) {}

    // work(i) for every i below `count`, and wait until all of it is done. Threads take neighbouring units together,
    // because the hardware reads ahead along memory: many at first, and fewer towards the end, so that all threads end
    // at about the same time.
    template <typename Work>
    void share(long count, Work work) {
      Part& part = team.part[at++];
      for (long from = part.next.load(std::memory_order_relaxed); from < count;) {
        long left = count - from, chunk = team.threads == 1 ? left : (left + 2 * team.threads - 1) / (2 * team.threads);
        if (!part.next.compare_exchange_weak(from, from + chunk, std::memory_order_relaxed)) continue;
        for (long i = from; i < from + chunk; i++) work(i);
        part.done.fetch_add(chunk, std::memory_order_release);
        from = part.next.load(std::memory_order_relaxed);
      }
      for (long turns = 0; part.done.load(std::memory_order_acquire) < count; turns++) pause(turns);
    }

   private:
    Team& team;
    long at = 0;

    static void pause(long turns) {
      if (turns > PATIENCE) sched_yield();
#if defined(__x86_64__)
      else __builtin_ia32_pause();
#endif
    }
  };

 private:
  static constexpr long PATIENCE = 2000;  // turns before a waiting thread offers its core to others
  struct alignas(128) Part {              // apart, so that threads do not fight for one cache line
    std::atomic<long> next{0}, done{0};
  };
  long threads;
  std::unique_ptr<Part[]> part;
};
