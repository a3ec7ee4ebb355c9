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
    // because the hardware reads ahead along memory.
    template <typename Work>
    void share(long count, Work work) {
      Part& part = team.part[at++];
      long chunk = count / (4 * team.threads);
      if (chunk < 1) chunk = 1;
      if (team.threads == 1) chunk = count;
      for (long from; (from = part.next.fetch_add(chunk, std::memory_order_relaxed)) < count;) {
        long to = from + chunk < count ? from + chunk : count;
        for (long i = from; i < to; i++) work(i);
        part.done.fetch_add(to - from, std::memory_order_release);
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
