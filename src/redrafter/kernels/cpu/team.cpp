// The threads that help a caller. They are started when they are first needed, and sleep between calls.
#include "team.h"

#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

constexpr long PATIENCE = 200;  // turns that a helper looks for more work before it sleeps: about 10 µs

class Helpers {
 public:
  void run(long threads, const std::function<void()>& work) {
    if (threads <= 1) return work();
    std::unique_lock<std::mutex> alone(one_call, std::try_to_lock);
    if (!alone.owns_lock()) return work();
    {
      std::lock_guard<std::mutex> guard(lock);
      try {
        for (; count < threads - 1; count++) std::thread([this, index = count] { help(index); }).detach();
      } catch (const std::system_error&) {  // a limit on threads: those that are there do the work
      }
      job = &work, wanted = threads - 1;
      turn.fetch_add(1);
    }
    wake.notify_all();
    work();
    std::unique_lock<std::mutex> guard(lock);
    job = nullptr;  // a helper that has not begun by now is not needed
    left.wait(guard, [this] { return inside == 0; });
  }

 private:
  std::mutex one_call, lock;
  std::condition_variable wake, left;
  const std::function<void()>* job = nullptr;
  long count = 0, wanted = 0, inside = 0;
  std::atomic<long> turn{0};

  void help(long index) {
    long seen = 0;
    while (true) {
      for (long turns = 0; turns < PATIENCE && turn.load() == seen; turns++) pause_thread();
      std::unique_lock<std::mutex> guard(lock);
      wake.wait(guard, [&] { return turn.load() != seen; });
      seen = turn.load();
      if (!job || index >= wanted) continue;
      const auto& work = *job;
      inside++;
      guard.unlock();
      work();
      guard.lock();
      if (--inside == 0) left.notify_one();
    }
  }
};

// Never deleted: helpers sleep in it until the process ends.
Helpers* helpers = new Helpers;
// A process that was forked has none of its parent's threads.
const int forked = pthread_atfork(nullptr, nullptr, [] { helpers = new Helpers; });

}  // namespace

void run_together(long threads, const std::function<void()>& work) { helpers->run(threads, work); }
